// Host entry of the CUDA moves of pages: launches on the given stream and returns; no allocation, no
// synchronisation. Page ids are read on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

cudaError_t move_pages(const core::MovePagesParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
