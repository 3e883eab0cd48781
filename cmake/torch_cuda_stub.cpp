// Stands in for libtorch_cuda at link time where torch is a CPU build: only the names that _ops_cuda.so uses, never run.
// At run time the real library, already loaded by torch, answers to the same name.
extern "C" void aoti_torch_get_current_cuda_stream() {}
