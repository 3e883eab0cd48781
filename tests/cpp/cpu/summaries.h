// Page summaries of a problem, sealed by the kernel under test, and their numbers read back by the
// documented byte layout (core/scorer.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/params.h"
#include "core/scorer.h"
#include "drive.h"
#include "elements.h"
#include "paged_problem.h"

namespace tinyserve::cpu::testing {

inline constexpr uint8_t kUntouched = 0xcd;

struct Summaries {
  const core::Scorer* scorer = nullptr;
  int64_t head_dim = 0;
  int64_t page_size = 0;
  int64_t num_kv_heads = 0;
  std::vector<uint8_t> bytes;  // [num_pages, num_kv_heads, summary_bytes]

  Summaries(const core::Scorer& for_scorer, const PagedProblem& problem)
      : scorer(&for_scorer),
        head_dim(problem.shape.head_dim),
        page_size(problem.shape.page_size),
        num_kv_heads(problem.shape.num_kv_heads),
        bytes(problem.num_pages * num_kv_heads * row_bytes(), kUntouched) {}

  int64_t row_bytes() const { return scorer->summary_bytes(head_dim, page_size); }
  core::PageSummaryView view() {
    return {.data = bytes.data(), .page_stride = num_kv_heads * row_bytes(), .head_stride = row_bytes()};
  }
  const uint8_t* row(int64_t page_id, int64_t head) const {
    return bytes.data() + (page_id * num_kv_heads + head) * row_bytes();
  }
  float scale(int64_t page_id, int64_t head, int vector) const {
    float scale;
    std::memcpy(&scale, row(page_id, head) + 4 * vector, 4);
    return scale;
  }
  int code(int64_t page_id, int64_t head, int vector, int64_t d) const {
    return static_cast<int8_t>(row(page_id, head)[core::kSummaryHeaderBytes + vector * head_dim + d]);
  }
  // What the summary of a linear scorer says of one channel. For int8 codes the product in fp32, as the
  // kernels take it.
  float number(int64_t page_id, int64_t head, int vector, int64_t d) const {
    if (scorer->encoding == core::SummaryEncoding::kInt8) {
      return scale(page_id, head, vector) * static_cast<float>(code(page_id, head, vector, d));
    }
    const int64_t i = vector * head_dim + d;
    const uint8_t* begin = row(page_id, head);
    if (scorer->full_type == ElementType::kFloat32) {
      float x;
      std::memcpy(&x, begin + 4 * i, 4);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, begin + 2 * i, 2);
    return static_cast<float>(small_float(scorer->full_type).decode(bits));
  }
};

// The ids of the pages that are full of stored tokens.
inline std::vector<int32_t> full_page_ids(const PagedProblem& problem) {
  std::vector<int32_t> ids;
  for (size_t s = 0; s < problem.sequences.size(); ++s) {
    const int64_t stored = problem.sequences[s].length - problem.sequences[s].num_new;
    for (int64_t page = 0; page < stored / problem.shape.page_size; ++page) {
      if (problem.page_tables[s][page] >= 0) ids.push_back(problem.page_tables[s][page]);
    }
  }
  return ids;
}

inline Summaries seal(const KernelTable& kernels, const PagedProblem& problem, const core::Scorer& scorer,
                      Schedule schedule = {}) {
  Summaries summaries(scorer, problem);
  const std::vector<int32_t> ids = full_page_ids(problem);
  const core::SealPagesParams params{.page_ids = ids.data(),
                                     .num_kv_heads = problem.shape.num_kv_heads,
                                     .head_dim = problem.shape.head_dim,
                                     .page_size = problem.shape.page_size,
                                     .k_pages = problem.k_pages,
                                     .page_summary = summaries.view(),
                                     .scorer = &scorer};
  run(kernels.seal_pages, params, static_cast<int64_t>(ids.size()) * problem.shape.num_kv_heads, schedule);
  return summaries;
}

// A full-precision summary is of the keys' own type; a page has no more ranks than keys less one.
inline bool fits(const core::Scorer& scorer, const Shape& shape) {
  if (scorer.encoding == core::SummaryEncoding::kFull) return scorer.full_type == shape.type;
  return scorer.rank < shape.page_size;
}

// A low-rank summary in numbers: key t ~ mean + sum over ranks of coefficient[r][t] * basis[r].
struct Sketch {
  std::vector<double> mean;                       // [head_dim]
  std::vector<std::vector<double>> basis;         // [rank][head_dim], codes
  std::vector<std::vector<double>> coefficients;  // [rank][page_size], codes times the scale

  std::vector<double> key(int64_t t) const {
    std::vector<double> out = mean;
    for (size_t r = 0; r < basis.size(); ++r) {
      for (size_t d = 0; d < out.size(); ++d) out[d] += coefficients[r][t] * basis[r][d];
    }
    return out;
  }
};

// Code i of int4 blocks.
inline int int4_code(const uint8_t* blocks, int64_t i) {
  const uint8_t byte = blocks[i / 16 * 8 + i % 8];
  return (i % 16 < 8 ? byte & 15 : byte >> 4) - 8;
}

inline Sketch read_sketch(const Summaries& summaries, int64_t page_id, int64_t head) {
  const core::Scorer& scorer = *summaries.scorer;
  const int64_t basis_bytes = (summaries.head_dim + 15) / 16 * 8;
  const int64_t coefficient_bytes = (summaries.page_size + 15) / 16 * 8;
  const uint8_t* mean = summaries.row(page_id, head);
  const uint8_t* basis = mean + summaries.head_dim;
  const uint8_t* coefficients = basis + scorer.rank * basis_bytes;
  const uint8_t* scales = coefficients + scorer.rank * coefficient_bytes;
  const auto scale = [&](int i) {
    uint16_t bits;
    std::memcpy(&bits, scales + 2 * i, 2);
    return kBFloat16.decode(bits);
  };
  Sketch sketch;
  for (int64_t d = 0; d < summaries.head_dim; ++d) {
    sketch.mean.push_back(scale(0) * static_cast<int8_t>(mean[d]));
  }
  for (int r = 0; r < scorer.rank; ++r) {
    std::vector<double>& vector = sketch.basis.emplace_back();
    for (int64_t d = 0; d < summaries.head_dim; ++d) {
      vector.push_back(int4_code(basis + r * basis_bytes, d));
    }
    std::vector<double>& along = sketch.coefficients.emplace_back();
    for (int64_t t = 0; t < summaries.page_size; ++t) {
      along.push_back(scale(1 + r) * int4_code(coefficients + r * coefficient_bytes, t));
    }
  }
  return sketch;
}

}  // namespace tinyserve::cpu::testing
