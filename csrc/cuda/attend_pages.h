// Host entry of the CUDA attend_pages: launches on the given stream and returns; no allocation, no
// synchronisation, nothing is read on the host. The caller owns partials and chunks_done; the latter are
// zeroed once and left as zeros by each launch. Launches that may overlap need their own.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace tinyserve::cuda {

// params.attend.max_chunks: of max_chunks() in cuda/attend_chunks.h, for the longest list that may come.
// page_lse is written for the entries of the lists only, as on the CPU.
cudaError_t attend_pages(const core::AttendPagesBatchParams& params, cudaStream_t stream);

}  // namespace tinyserve::cuda
