// The emulator as the device of the CUDA ops (torch/cuda/device.h), for the library file that the Python
// tests load: tensors lie on the CPU, and a launch has ended when it returns.
#include <cstring>

#include "torch/cuda/device.h"

namespace tinyserve {

CurrentDevice::CurrentDevice(const Tensor& tensor, const char* name) { check_device(tensor, name); }

void CurrentDevice::check_launched(cudaError_t error, const char* op) const {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA error ", static_cast<int>(error));
}

void CurrentDevice::fill_with_zeros(void* data, size_t bytes) const { std::memset(data, 0, bytes); }

}  // namespace tinyserve
