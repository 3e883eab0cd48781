// How a kernel is launched, the same for the GPU and for the emulator.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace tinyserve::cuda {

struct LaunchConfig {
  dim3 grid = {1, 1, 1};
  dim3 block = {1, 1, 1};
  size_t shared_bytes = 0;  // dynamic shared memory of a block
  cudaStream_t stream = nullptr;
  unsigned cluster_size = 1;  // blocks of a cluster, along x; more than 1 needs sm_90
  // Begin while the kernel before it in the stream still runs (sm_90; ignored elsewhere). The kernel must
  // call wait_for_previous_kernel() before it reads or writes what an earlier kernel touches.
  bool overlap_previous = false;
};

}  // namespace tinyserve::cuda
