// The device of a CUDA op: made the current one, its stream, and what is asked of it besides kernels. The
// only part of the CUDA ops that differs between a GPU (device.cpp) and the emulator of the tests
// (tests/cpp/cuda_emulator/torch_device.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>

#include <torch/csrc/stable/accelerator.h>

#include "torch/checks.h"

namespace tinyserve {

class CurrentDevice {
 public:
  // Makes the device of `tensor` the current one while the object lives. All other tensors of the op must be
  // there (check_device), so this comes before their checks.
  CurrentDevice(const Tensor& tensor, const char* name);

  // torch's current stream of the device: all that an op does goes there, in order, and nothing is waited
  // for.
  cudaStream_t stream() const { return stream_; }

  // Throws with the name of the op, unless its kernels were launched.
  void check_launched(cudaError_t error, const char* op) const;

  // Sets memory to zeros, in the order of the stream.
  void fill_with_zeros(void* data, size_t bytes) const;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace tinyserve
