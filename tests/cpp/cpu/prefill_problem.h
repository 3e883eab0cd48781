// Batches of new tokens behind stored ones, for the tests of prefill_attention on the CPU and in CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"
#include "paged_problem.h"

namespace tinyserve::cpu::testing {

// A later chunk of a prompt, a first chunk, one new token, and one that begins with two padding slots.
inline std::vector<Sequence> prefill_batch(const Shape& shape) {
  const int64_t stored = 2 * shape.page_size + shape.page_size / 2 + 60;
  return {{stored + 19, 19}, {70, 70}, {shape.page_size + 1, 1}, {5, 5}};
}

inline std::vector<RowAt> prefill_rows(const std::vector<Sequence>& batch) {
  std::vector<RowAt> rows;
  for (size_t s = 0; s < batch.size(); ++s) {
    const int64_t padding = s == 3 ? 2 : 0;
    for (int64_t p = batch[s].length - batch[s].num_new - padding; p < batch[s].length; ++p) {
      rows.push_back({static_cast<int32_t>(s), p});
    }
  }
  return rows;
}

struct Packed {
  Elements storage;  // [num_rows, 2 * num_kv_heads, head_dim]: keys, then values
  core::PackedView k;
  core::PackedView v;
};

inline Packed pack_new_tokens(const PagedProblem& problem) {
  const Shape& shape = problem.shape;
  const int64_t token_stride = 2 * shape.num_kv_heads * shape.head_dim;
  Packed packed{Elements(shape.query_type(), problem.num_rows() * token_stride), {}, {}};
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    const auto [s, position] = problem.row_places[row];
    if (position < 0) continue;  // stays NaN
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const int64_t i = row * token_stride + head * shape.head_dim + d;
        packed.storage.set(i, problem.key(s, head, position)[d]);
        packed.storage.set(i + shape.num_kv_heads * shape.head_dim, problem.value(s, head, position)[d]);
      }
    }
  }
  packed.k = {packed.storage.data(), shape.query_type(), token_stride, shape.head_dim};
  packed.v = packed.k;
  packed.v.data =
      packed.storage.data() + shape.num_kv_heads * shape.head_dim * core::element_size(shape.query_type());
  return packed;
}

}  // namespace tinyserve::cpu::testing
