// copy_pages, gather_pages, scatter_pages in CUDA: checks and launches, one for each part of the pages.

#include "cuda/move_pages.h"
#include "torch/cuda/device.h"
#include "torch/page_parts.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

void launch_moves(const CurrentDevice& device, const std::vector<core::MovePagesParams>& moves,
                  const char* op) {
  for (const core::MovePagesParams& move : moves) {
    device.check_launched(cuda::move_pages(move, device.stream()), op);
  }
}

void copy_pages(Tensor src_page_ids, Tensor dst_page_ids, Tensor k_pages, Tensor v_pages,
                std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                std::optional<Tensor> page_summary) {
  const CurrentDevice device(k_pages, "k_pages");
  const PageParts pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  check_parts(pools);
  const int32_t* from = check_int32(src_page_ids, "src_page_ids", 1, "[num_page_ids]");
  const int32_t* to = check_int32(dst_page_ids, "dst_page_ids", 1, "[num_page_ids]");
  const int64_t count = src_page_ids.size(0);
  check_size(dst_page_ids, "dst_page_ids", 0, count, "as src_page_ids");
  launch_moves(device, plan_copy(pools, from, to, count), "copy_pages");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_pages(Tensor page_ids, Tensor k_pages,
                                                                Tensor v_pages,
                                                                std::optional<Tensor> k_scales,
                                                                std::optional<Tensor> v_scales,
                                                                std::optional<Tensor> page_summary) {
  const CurrentDevice device(k_pages, "k_pages");
  const PageParts pools = parts_of(k_pages, v_pages, k_scales, v_scales, page_summary);
  check_parts(pools);
  const int32_t* ids = check_int32(page_ids, "page_ids", 1, "[num_page_ids]");
  const auto [gathered, moves] = plan_gather(pools, ids, page_ids.size(0));
  launch_moves(device, moves, "gather_pages");
  return {gathered[0], gathered[1], gathered[2], gathered[3], gathered[4]};
}

void scatter_pages(Tensor page_ids, Tensor k, Tensor v, std::optional<Tensor> k_scales_in,
                   std::optional<Tensor> v_scales_in, std::optional<Tensor> summary_in, Tensor k_pages,
                   Tensor v_pages, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                   std::optional<Tensor> page_summary) {
  const CurrentDevice device(k_pages, "k_pages");
  const int32_t* ids = check_int32(page_ids, "page_ids", 1, "[num_page_ids]");
  std::vector<core::MovePagesParams> moves =
      plan_scatter(parts_of(k, v, k_scales_in, v_scales_in, summary_in),
                   parts_of(k_pages, v_pages, k_scales, v_scales, page_summary), page_ids.size(0));
  for (core::MovePagesParams& move : moves) move.to_ids = ids;
  launch_moves(device, moves, "scatter_pages");
}

}  // namespace

TINYSERVE_CUDA_OPS(m) {
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
  m.impl("gather_pages", TORCH_BOX(&gather_pages));
  m.impl("scatter_pages", TORCH_BOX(&scatter_pages));
}

}  // namespace tinyserve
