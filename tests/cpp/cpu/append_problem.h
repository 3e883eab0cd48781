// New tokens to append, empty pools to append them to, and what the pools should hold then: for the tests of
// append_kv on the CPU and in CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "elements.h"
#include "paged_problem.h"

namespace tinyserve::cpu::testing {

using core::PackedView;
using core::PageWrite;

// New tokens for four pages of an empty pool: a whole page, a part from the first slot on, the last slot, a
// part in the middle.
struct Appending {
  Appending(const Shape& wanted, ElementType source_type, uint32_t seed) : shape(wanted), random(seed) {
    const int64_t page_size = shape.page_size;
    std::vector<int32_t> ids{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(ids, random);
    add(ids[0], page_size, 0);
    add(ids[1], std::max<int64_t>(1, page_size / 2), 0);
    add(ids[2], 1, page_size - 1);
    add(ids[3], std::max<int64_t>(1, page_size / 3), page_size / 3);
    draw_tokens(source_type);
  }

  // Those of the given tokens that are to be written. Packed by head, in rows of odd length, if wanted.
  Appending(const Shape& wanted, ElementType source_type, uint32_t seed, int64_t tokens,
            std::vector<PageWrite> to_write, bool heads_first = false)
      : shape(wanted), random(seed), writes(std::move(to_write)), num_tokens(tokens) {
    draw_tokens(source_type, heads_first);
  }

  void draw_tokens(ElementType source_type, bool heads_first = false) {
    const int64_t num_heads = 3 * shape.num_kv_heads;
    token_stride = heads_first ? shape.head_dim + 1 : num_heads * shape.head_dim;
    head_stride = heads_first ? num_tokens * token_stride : shape.head_dim;
    source = Elements(source_type, heads_first ? num_heads * head_stride : num_tokens * token_stride);
    std::normal_distribution<double> normal(0.0, 100.0);
    // By token: numbers of one size, numbers of all sizes, infinities and NaN among them (poison in int8).
    constexpr double kSpecial[] = {0.0, -0.0, 7e4, -1e-7, 1e-40, 65519.9, 3e38, kInfinity, -kInfinity, kNan};
    for (int64_t i = 0; i < source.size(); ++i) {
      const int64_t token = i / token_stride % num_tokens;
      const size_t num_special = token % 3 == 0 ? 2 : (token % 3 == 1 ? 6 : std::size(kSpecial));
      const bool is_zero = token % 7 == 6;
      source.set(i, random() % 8 == 0 ? kSpecial[random() % num_special] : (is_zero ? -0.0 : normal(random)));
    }
  }

  void add(int64_t page_id, int64_t count, int64_t slot) {
    writes.push_back({.page_id = page_id,
                      .first_token = static_cast<int32_t>(num_tokens),
                      .num_tokens = static_cast<int32_t>(count),
                      .first_slot = static_cast<int32_t>(slot)});
    num_tokens += count;
  }

  int64_t head_offset(int part, int64_t token, int64_t head) const {
    return token * token_stride + (part * shape.num_kv_heads + head) * head_stride;
  }
  PackedView packed(int part) const {
    return {.data = source.data() + head_offset(part, 0, 0) * tinyserve::core::element_size(source.type()),
            .type = source.type(),
            .token_stride = token_stride,
            .head_stride = head_stride};
  }
  std::vector<PageWrite> single_token_writes() const {
    std::vector<PageWrite> singles;
    for (const PageWrite& write : writes) {
      for (int32_t i = 0; i < write.num_tokens; ++i) {
        singles.push_back({write.page_id, write.first_token + i, 1, write.first_slot + i});
      }
    }
    return singles;
  }

  Shape shape;
  std::mt19937 random;
  std::vector<PageWrite> writes;
  int64_t num_tokens = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  Elements source;  // fused q, k, v; the parts 1 and 2 are appended
};

// Pools of pages, six or as many as wanted, that hold nothing yet.
struct EmptyPools {
  explicit EmptyPools(const Shape& shape) : EmptyPools(shape, 6) {}
  EmptyPools(const Shape& shape, int64_t num_pages)
      : problem(shape, {{(num_pages - 2) * shape.page_size, (num_pages - 2) * shape.page_size}},
                {{0, (num_pages - 2) * shape.page_size - 1}}, 1) {}

  PagedProblem problem;
};

// Codes of a row of int8 pages, and its scale.
inline float expected_row(const std::vector<double>& row, std::vector<double>& codes) {
  codes.assign(row.size(), 0.0);
  float amax = 0.0F;
  for (const double x : row) {
    if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, std::fabs(static_cast<float>(x)));
  }
  const float scale = amax / 127.0F;
  for (size_t d = 0; d < row.size() && scale > 0.0F; ++d) {
    codes[d] = std::clamp(std::nearbyint(static_cast<float>(row[d]) / scale), -127.0F, 127.0F);
  }
  return scale;
}

// What the pool should hold, and its scales where it is int8.
struct ExpectedPool {
  Elements pages;
  std::vector<float> scales;
};

inline ExpectedPool expected_int8_pool(const Appending& appending, const EmptyPools& pools, int part) {
  const auto& view = part == 1 ? pools.problem.k_pages : pools.problem.v_pages;
  ExpectedPool expected{Elements(ElementType::kInt8, view.num_pages * view.page_stride),
                        part == 1 ? pools.problem.k_scales() : pools.problem.v_scales()};
  for (const PageWrite& write : appending.writes) {
    for (int64_t i = 0; i < write.num_tokens; ++i) {
      for (int64_t head = 0; head < appending.shape.num_kv_heads; ++head) {
        std::vector<double> row(static_cast<size_t>(appending.shape.head_dim));
        for (size_t d = 0; d < row.size(); ++d) {
          row[d] = appending.source.get(appending.head_offset(part, write.first_token + i, head) +
                                        static_cast<int64_t>(d));
        }
        std::vector<double> codes;
        const int64_t slot = write.first_slot + i;
        const int64_t place = write.page_id * view.scale_page_stride + head * view.scale_head_stride + slot;
        expected.scales[place] = expected_row(row, codes);
        for (size_t d = 0; d < row.size(); ++d) {
          const auto channel = static_cast<int64_t>(d);
          expected.pages.set(pools.problem.offset(view, write.page_id, head, slot, channel), codes[d]);
        }
      }
    }
  }
  return expected;
}

inline ExpectedPool expected_pool(const Appending& appending, const EmptyPools& pools, int part) {
  if (appending.shape.type == ElementType::kInt8) return expected_int8_pool(appending, pools, part);
  const auto& view = part == 1 ? pools.problem.k_pages : pools.problem.v_pages;
  Elements expected(appending.shape.type, view.num_pages * view.page_stride);
  for (const PageWrite& write : appending.writes) {
    for (int64_t i = 0; i < write.num_tokens; ++i) {
      for (int64_t head = 0; head < appending.shape.num_kv_heads; ++head) {
        for (int64_t d = 0; d < appending.shape.head_dim; ++d) {
          expected.set(pools.problem.offset(view, write.page_id, head, write.first_slot + i, d),
                       appending.source.get(appending.head_offset(part, write.first_token + i, head) + d));
        }
      }
    }
  }
  return {expected, {}};
}

// The pool's pages, up to the end of the last one.
inline std::vector<uint8_t> pool_bytes(const tinyserve::core::PagePoolView& view) {
  const auto* begin = static_cast<const uint8_t*>(view.data);
  return {begin, begin + (view.num_pages * view.page_stride - 8) * tinyserve::core::element_size(view.type)};
}

inline std::vector<uint8_t> without_gap(const Elements& pool) {
  const auto gap = static_cast<size_t>(8 * tinyserve::core::element_size(pool.type()));
  return {pool.bytes().begin(), pool.bytes().end() - static_cast<int64_t>(gap)};
}

}  // namespace tinyserve::cpu::testing
