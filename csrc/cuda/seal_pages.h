// Host entry of the CUDA sealing: launches on the given stream and returns; no allocation, no
// synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t seal_pages(const core::SealPagesParams& params, int64_t num_page_ids, cudaStream_t stream);

}  // namespace tinyserve::cuda
