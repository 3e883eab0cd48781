// Host entry of the CUDA selection: launches on the given stream and returns; no allocation, no
// synchronisation. Lengths and budgets are read on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t select_pages(const core::SelectPagesBatchParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
