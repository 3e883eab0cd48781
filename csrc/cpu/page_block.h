// What decode attention reads at a time, the keys or values of a page and kv head, and how many tokens its
// chunks have.
#pragma once

#include <type_traits>

#include "core/limits.h"
#include "core/page_pool_view.h"
#include "cpu/softmax_tile.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {
namespace {

constexpr int64_t kMaxChunkTokens = core::kChunkPages * core::kMaxPageSize;

template <typename T>
struct Block {
  const T* data;
  const float* scales = nullptr;  // of an int8 page's tokens

  Block(const core::PagePoolView& pool, int64_t page_id, int64_t head) : data(pool.page<T>(page_id, head)) {
    if constexpr (std::is_same_v<T, int8_t>) scales = pool.token_scales(page_id, head);
  }
};

// Blocks that will be read after the current one.
template <typename T>
struct Next {
  Block<T> soon;
  Block<T> later;

  Ahead<T> data() const { return {soon.data, later.data}; }
  Ahead<float> scales() const { return {soon.scales, later.scales}; }
};

}  // namespace
}  // namespace tinyserve::cpu::TINYSERVE_TARGET
