// Attention from its definition, in double precision over the plain tokens, and the run of the attend_pages
// kernels on the same problem.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <vector>

#include "core/limits.h"
#include "drive.h"
#include "elements.h"
#include "paged_problem.h"

namespace tinyserve::cpu::testing {

// Page lists as select_pages returns them.
struct PageLists {
  int64_t width = 0;
  std::vector<int32_t> pages;   // [num_rows, num_kv_heads, width]
  std::vector<int32_t> counts;  // [num_rows, num_kv_heads]
};

// The pages of each row and kv head: those of the lists, or all visible ones.
inline std::vector<int64_t> pages_of(const PagedProblem& problem, const PageLists* lists, int64_t row,
                                     int64_t head) {
  std::vector<int64_t> pages;
  if (lists != nullptr) {
    const int64_t row_head = row * problem.shape.num_kv_heads + head;
    for (int32_t i = 0; i < lists->counts[row_head]; ++i) {
      pages.push_back(lists->pages[row_head * lists->width + i]);
    }
    return pages;
  }
  int64_t previous = -1;
  for (int64_t token = 0; token <= problem.row_places[row].position; ++token) {
    const int64_t page = token / problem.shape.page_size;
    if (problem.sees(row, token) && page != previous) pages.push_back(previous = page);
  }
  return pages;
}

struct ExpectedAttention {
  std::vector<double> out;       // [num_rows, num_heads, head_dim]
  std::vector<double> lse;       // [num_rows, num_heads]
  std::vector<double> page_lse;  // [num_rows, num_heads, width]
  // What decode over int8 pages may be off by beyond fp32 rounding: it rounds the queries of a head to 16
  // bits, which moves a logit by at most 2^-16 of the largest channel times the sum of the key's magnitudes
  // and its probability by twice that, and the probabilities of a page likewise. 0 for other pages.
  double out_rounding = 0.0;
  double lse_rounding = 0.0;
  double value_max = 0.0;  // the largest magnitude that a row sees
};

// Whether attention rounds the probabilities of this problem to bf16.
inline bool rounds_probabilities(const KernelTable& kernels, const PagedProblem& problem) {
  return std::string_view(kernels.target) == "avx512bf16" && problem.shape.type == ElementType::kBFloat16 &&
         problem.q.type == ElementType::kBFloat16;
}

// What that may cost. A probability is off by at most 2^-8 of itself and their sum is right, so the output
// moves by at most 2^-8 of the values' mean distance from it.
inline double probability_rounding(const ExpectedAttention& expected, const KernelTable& kernels,
                                   const PagedProblem& problem) {
  return rounds_probabilities(kernels, problem) ? 0x1.02p-8 * expected.value_max : 0.0;
}

// What decode may be off by on this target beyond fp32 rounding.
inline double decode_rounding(const ExpectedAttention& expected, const KernelTable& kernels,
                              const PagedProblem& problem) {
  return expected.out_rounding + probability_rounding(expected, kernels, problem);
}

inline double largest_magnitude(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double x : values) largest = std::max(largest, std::fabs(x));
  return largest;
}

inline ExpectedAttention expected_attention(const PagedProblem& problem, const PageLists* lists = nullptr,
                                            int64_t width = 0) {
  const Shape& shape = problem.shape;
  ExpectedAttention expected;
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    const int32_t s = problem.row_places[row].sequence;
    for (int64_t query_head = 0; query_head < shape.num_heads(); ++query_head) {
      const int64_t head = query_head / shape.group_size;
      const std::vector<double> q = problem.query(row, query_head);
      std::vector<double> out(static_cast<size_t>(shape.head_dim), 0.0);
      std::vector<double> page_sums(static_cast<size_t>(width), 0.0);
      double sum = 0.0;
      double key_sum = 0.0;
      double value_max = 0.0;
      size_t entry = 0;
      for (const int64_t page : pages_of(problem, lists, row, head)) {
        double page_sum = 0.0;
        for (int64_t slot = 0; slot < shape.page_size; ++slot) {
          const int64_t token = page * shape.page_size + slot;
          if (!problem.sees(row, token)) continue;
          const float* key = problem.key(s, head, token);
          const float* value = problem.value(s, head, token);
          double logit = 0.0;
          for (int64_t d = 0; d < shape.head_dim; ++d) logit += q[d] * key[d];
          key_sum = std::max(
              key_sum, std::accumulate(key, key + shape.head_dim, 0.0,
                                       [](double sum_so_far, float x) { return sum_so_far + std::fabs(x); }));
          value_max = std::max(value_max, largest_magnitude({value, value + shape.head_dim}));
          const double weight = std::exp(logit * shape.sm_scale());
          for (int64_t d = 0; d < shape.head_dim; ++d) out[d] += weight * value[d];
          page_sum += weight;
        }
        if (entry < page_sums.size()) page_sums[entry++] = page_sum;
        sum += page_sum;
      }
      expected.value_max = std::max(expected.value_max, value_max);
      if (shape.type == ElementType::kInt8) {
        const double logit = 0x1p-16 * shape.sm_scale() * largest_magnitude(q) * key_sum;
        expected.lse_rounding = std::max(expected.lse_rounding, logit);
        expected.out_rounding =
            std::max(expected.out_rounding, (2 * logit + 0x1p-16 * shape.page_size) * value_max);
      }
      for (const double x : out) expected.out.push_back(sum == 0.0 ? 0.0 : x / sum);
      expected.lse.push_back(std::log(sum));
      for (const double page_sum : page_sums) expected.page_lse.push_back(std::log(page_sum));
    }
  }
  return expected;
}

struct Attention {
  Elements out;
  std::vector<float> lse;
  std::vector<float> page_lse;
};

inline int64_t max_visible_pages(const PagedProblem& problem) {
  int64_t most = 0;
  for (const core::Row& row : problem.rows) {
    most = std::max(most, row.num_visible_pages(problem.shape.page_size));
  }
  return most;
}

// `spare_chunks`: the driver may provide for longer lists than there are.
inline Attention attend(const KernelTable& kernels, const PagedProblem& problem,
                        const PageLists* lists = nullptr, Schedule schedule = {}, bool with_page_lse = false,
                        int64_t spare_chunks = 0) {
  const Shape& shape = problem.shape;
  const int64_t width = lists != nullptr ? lists->width : max_visible_pages(problem);
  const int64_t max_chunks =
      std::max<int64_t>(1, (width + core::kChunkPages - 1) / core::kChunkPages) + spare_chunks;
  const int64_t num_heads = problem.num_rows() * shape.num_heads();
  Attention result{.out = Elements(shape.query_type(), num_heads * shape.head_dim),
                   .lse = std::vector<float>(num_heads, static_cast<float>(kNan)),
                   .page_lse = {}};
  if (with_page_lse) result.page_lse.assign(num_heads * width, -static_cast<float>(kInfinity));
  const int64_t num_row_heads = problem.num_rows() * shape.num_kv_heads;
  std::vector<int32_t> chunks_done(num_row_heads, 0);
  std::vector<float> partials(num_heads * max_chunks * (shape.head_dim + 2), static_cast<float>(kNan));
  const core::AttendPagesParams params{.q = problem.q,
                                       .rows = problem.rows.data(),
                                       .num_kv_heads = shape.num_kv_heads,
                                       .group_size = shape.group_size,
                                       .head_dim = shape.head_dim,
                                       .page_size = shape.page_size,
                                       .k_pages = problem.k_pages,
                                       .v_pages = problem.v_pages,
                                       .selected_pages = lists != nullptr ? lists->pages.data() : nullptr,
                                       .num_selected = lists != nullptr ? lists->counts.data() : nullptr,
                                       .list_width = width,
                                       .max_chunks = max_chunks,
                                       .sm_scale = shape.sm_scale(),
                                       .partials = partials.data(),
                                       .chunks_done = chunks_done.data(),
                                       .page_lse = with_page_lse ? result.page_lse.data() : nullptr,
                                       .out = result.out.data(),
                                       .lse = result.lse.data()};
  run(kernels.attend_pages, params, num_row_heads * max_chunks, schedule);
  return result;
}

inline void require_same_attention(const Attention& actual, const Attention& expected) {
  require_same_bits(actual.out.bytes(), expected.out.bytes());
  require_same_bits(actual.lse, expected.lse);
}

// fp32 arithmetic, then one rounding to the type of the output.
inline void require_close_outputs(const Elements& out, const std::vector<double>& expected,
                                  double rounding = 0.0) {
  require_close(out.values(), expected, 3e-5 + rounding, 1.05 * unit_roundoff(out.type()));
}

}  // namespace tinyserve::cpu::testing
