// Host entry of the CUDA scores: launches on the given stream and returns; no allocation, no
// synchronisation. Lengths and page table are read on the device. Summary rows are aligned to
// kSummaryAlignment.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t score_pages(const core::ScorePagesBatchParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
