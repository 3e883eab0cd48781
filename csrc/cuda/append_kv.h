// Host entry of the CUDA append: launches on the given stream and returns; no allocation, no synchronisation.
// Lengths and page table are read on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t append_kv(const core::AppendKvBatchParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
