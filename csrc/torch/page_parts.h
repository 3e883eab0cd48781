// The tensors that make up pages (keys, values, scales, summaries), checked and turned into moves of blocks,
// for copy_pages, gather_pages and scatter_pages. Bits are moved, so every element type and layout is
// accepted.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "core/params.h"
#include "torch/checks.h"

namespace tinyserve {

// Null where a part is absent.
using PageParts = std::array<const Tensor*, 5>;

PageParts parts_of(const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scales,
                   const std::optional<Tensor>& v_scales, const std::optional<Tensor>& page_summary);

// Pools that copy_pages and gather_pages take.
void check_parts(const PageParts& pools);

// Moves within the pools. The ids come from a list of `count`.
std::vector<core::MovePagesParams> plan_copy(const PageParts& pools, const int32_t* from_ids,
                                             const int32_t* to_ids, int64_t count);

// Moves out of the pools, into new tensors; an absent part is a tensor of size 0.
struct Gathering {
  std::array<Tensor, 5> gathered;
  std::vector<core::MovePagesParams> moves;
};
Gathering plan_gather(const PageParts& pools, const int32_t* ids, int64_t count);

// Moves of what was gathered into the pools, without the ids.
std::vector<core::MovePagesParams> plan_scatter(const PageParts& sources, const PageParts& pools,
                                                int64_t count);

}  // namespace tinyserve
