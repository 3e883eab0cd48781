#include "cuda/score_pages.h"

#include <algorithm>
#include <type_traits>

#include "core/limits.h"
#include "cuda/element.cuh"
#include "cuda/join_scores.cuh"
#include "cuda/score_low_rank.cuh"
#include "cuda/score_pages.cuh"

namespace tinyserve::cuda {
namespace {

LaunchConfig over_rows_and_heads(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  return {.grid = {static_cast<unsigned>(params.num_rows), static_cast<unsigned>(params.num_kv_heads)},
          .stream = stream};
}

template <typename Scoring>
cudaError_t launch_scores(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxTiles = 65535;
  constexpr int64_t kTilePages = int64_t{Scoring::kPages} * kScoreSlots;
  LaunchConfig config = over_rows_and_heads(params, stream);
  config.grid.z =
      static_cast<unsigned>(std::min((params.batch.max_pages + kTilePages - 1) / kTilePages, kMaxTiles));
  config.block.x = kScoreThreads;
  config.shared_bytes =
      static_cast<size_t>(Scoring::shared_floats(*params.scorer, params.head_dim)) * sizeof(float);
  return launch(&score_pages_kernel<Scoring>, config, params, *params.scorer);
}

template <typename Code>
cudaError_t launch_linear(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  const int64_t heads = params.group_reduction == core::GroupReduction::kMean ? 1 : params.group_size;
  if (heads == 1) return launch_scores<LinearScoring<Code, 1>>(params, stream);
  if (heads == 2) return launch_scores<LinearScoring<Code, 2>>(params, stream);
  if (heads <= 4) return launch_scores<LinearScoring<Code, 4>>(params, stream);
  return launch_scores<LinearScoring<Code, 8>>(params, stream);
}

template <int kBlocks>
cudaError_t launch_low_rank(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  if (params.group_size == 1) return launch_scores<LowRankScoring<kBlocks, 1>>(params, stream);
  return launch_scores<LowRankScoring<kBlocks, 4>>(params, stream);
}

cudaError_t launch_scorer(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  switch (params.scorer->encoding) {
    case core::SummaryEncoding::kInt8:
      return launch_linear<int8_t>(params, stream);
    case core::SummaryEncoding::kFull:
      return dispatch_element(params.scorer->full_type, [&](auto* tag) {
        return launch_linear<std::remove_pointer_t<decltype(tag)>>(params, stream);
      });
    case core::SummaryEncoding::kLowRank:
      if (params.group_reduction == core::GroupReduction::kMean) break;
      constexpr int kMaxBlocks = static_cast<int>(core::kMaxPageSize / core::kInt4Block);
      return params.page_size <= core::kInt4Block ? launch_low_rank<1>(params, stream)
                                                  : launch_low_rank<kMaxBlocks>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t score_pages(const core::ScorePagesBatchParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.num_kv_heads == 0 || params.batch.max_pages == 0) return cudaSuccess;
  const cudaError_t error = launch_scorer(params, stream);
  if (error != cudaSuccess || params.group_reduction != core::GroupReduction::kSoftmax) return error;
  LaunchConfig config = over_rows_and_heads(params, stream);
  config.block.x = kJoinThreads;
  config.shared_bytes = static_cast<size_t>(kJoinWarps + params.group_size) * sizeof(float);
  return launch(&join_scores_kernel, config, params);
}

}  // namespace tinyserve::cuda
