// Host entry of the CUDA prefill_attention: launches on the given stream and returns; no allocation, no
// synchronisation. Lengths and page table are read on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t prefill_attention(const core::PrefillAttentionBatchParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
