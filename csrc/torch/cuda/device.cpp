#include "torch/cuda/device.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace tinyserve {

void check_device(const Tensor& tensor, const char* name) {
  TINYSERVE_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == torch::stable::accelerator::getCurrentDeviceIndex(),
      name, ": expected a tensor on the GPU of the others, got one on another device");
}

CurrentDevice::CurrentDevice(const Tensor& tensor, const char* name) {
  TINYSERVE_CHECK(tensor.is_cuda(), name,
                  ": expected a tensor on the GPU of the others, got one on another device");
  guard_.emplace(tensor.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  stream_ = static_cast<cudaStream_t>(stream);
}

void CurrentDevice::check_launched(cudaError_t error, const char* op) const {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else torch would find it after its own next launch
  STD_TORCH_CHECK(false, op, ": ", cudaGetErrorString(error));
}

void CurrentDevice::fill_with_zeros(void* data, size_t bytes) const {
  check_launched(cudaMemsetAsync(data, 0, bytes, stream_), "memset");
}

}  // namespace tinyserve
