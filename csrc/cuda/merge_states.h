// Host entry of the CUDA merge: launches on the given stream and returns; no allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t merge_states(const core::MergeStatesParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
