// prefill_attention against attention's definition: new tokens over the stored ones and over themselves.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_oracle.h"
#include "prefill_problem.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;
using tinyserve::core::PrefillBlock;

namespace {

std::vector<PrefillBlock> cut_blocks(const PagedProblem& problem, int64_t block_rows) {
  std::vector<PrefillBlock> blocks;
  for (int64_t row = 0; row < problem.num_rows();) {
    const auto [s, position] = problem.row_places[row];
    if (position < 0) {
      ++row;
      continue;
    }
    const int64_t stored = problem.sequences[s].length - problem.sequences[s].num_new;
    const int64_t count = std::min(block_rows, problem.sequences[s].length - position);
    blocks.push_back({.page_table = problem.page_tables[s].data(),
                      .first_row = row,
                      .num_rows = count,
                      .first_position = position,
                      .stored = stored,
                      .first_new_row = row - (position - stored)});
    row += count;
  }
  return blocks;
}

Attention prefill(const KernelTable& kernels, const PagedProblem& problem,
                  const std::vector<PrefillBlock>& blocks, Schedule schedule = {}) {
  const Shape& shape = problem.shape;
  const Packed packed = pack_new_tokens(problem);
  Attention result{
      .out = Elements(shape.query_type(), problem.num_rows() * shape.num_heads() * shape.head_dim),
      .lse = std::vector<float>(problem.num_rows() * shape.num_heads(), static_cast<float>(kNan)),
      .page_lse = {}};
  const tinyserve::core::PrefillAttentionParams params{.q = problem.q,
                                                       .k = packed.k,
                                                       .v = packed.v,
                                                       .blocks = blocks.data(),
                                                       .num_kv_heads = shape.num_kv_heads,
                                                       .group_size = shape.group_size,
                                                       .head_dim = shape.head_dim,
                                                       .page_size = shape.page_size,
                                                       .k_pages = problem.k_pages,
                                                       .v_pages = problem.v_pages,
                                                       .window = shape.window,
                                                       .sm_scale = shape.sm_scale(),
                                                       .out = result.out.data(),
                                                       .lse = result.lse.data()};
  run(kernels.prefill_attention, params, static_cast<int64_t>(blocks.size()) * shape.num_kv_heads, schedule);
  return result;
}

int64_t most_rows(const Shape& shape) { return tinyserve::core::kPrefillQueries / shape.group_size; }

// Rows in padding slots are no block's; what the driver put there stays.
void leave_padding_untouched(const PagedProblem& problem, ExpectedAttention& expected) {
  const Shape& shape = problem.shape;
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    if (problem.row_places[row].position >= 0) continue;
    const int64_t heads = shape.num_heads();
    std::fill_n(expected.lse.begin() + row * heads, heads, kNan);
    std::fill_n(expected.out.begin() + row * heads * shape.head_dim, heads * shape.head_dim, kNan);
  }
}

}  // namespace

TEST_CASE("Prefill follows attention's definition for every type, layout and shape") {
  for (const Shape& shape : covering_shapes()) {
    CAPTURE(shape);
    const std::vector<Sequence> batch = prefill_batch(shape);
    const PagedProblem problem(shape, batch, prefill_rows(batch), 1);
    ExpectedAttention expected = expected_attention(problem);
    leave_padding_untouched(problem, expected);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention actual = prefill(*kernels, problem, cut_blocks(problem, most_rows(shape)));
      require_close_outputs(actual.out, expected.out, probability_rounding(expected, *kernels, problem));
      require_close(as_doubles(actual.lse), expected.lse, 3e-5);
    }
  }
}

TEST_CASE("Threads, order and company do not change a bit of prefill") {
  for (const Shape& shape : covering_shapes(16)) {
    CAPTURE(shape);
    const std::vector<Sequence> batch = prefill_batch(shape);
    const PagedProblem problem(shape, batch, prefill_rows(batch), 2);
    const std::vector<PrefillBlock> blocks = cut_blocks(problem, most_rows(shape));
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention serial = prefill(*kernels, problem, blocks);
      for (const Schedule& schedule : kOtherSchedules) {
        CAPTURE(schedule);
        require_same_attention(prefill(*kernels, problem, blocks, schedule), serial);
      }
      std::vector<PrefillBlock> reversed(blocks.rbegin(), blocks.rend());
      require_same_attention(prefill(*kernels, problem, reversed), serial);
    }
  }
}

TEST_CASE("However the rows are cut into blocks, prefill agrees within fp32 rounding") {
  for (const auto& [type, window] : {std::pair{ElementType::kFloat32, int64_t{-1}},
                                     {ElementType::kFloat32, 13},
                                     {ElementType::kFloat32, 90},
                                     {ElementType::kBFloat16, 13}}) {
    const Shape shape{.type = type,
                      .page_size = 7,
                      .head_dim = 40,
                      .group_size = 5,
                      .channel_major = true,
                      .window = window};
    const std::vector<Sequence> batch = prefill_batch(shape);
    const PagedProblem problem(shape, batch, prefill_rows(batch), 3);
    const ExpectedAttention expected = expected_attention(problem);
    for (const KernelTable* kernels : targets()) {
      const double rounding = 2.0 * probability_rounding(expected, *kernels, problem);
      const Attention largest = prefill(*kernels, problem, cut_blocks(problem, most_rows(shape)));
      for (const int64_t block_rows : {1, 2, 3, 11}) {
        CAPTURE(window, kernels->target, block_rows);
        const Attention other = prefill(*kernels, problem, cut_blocks(problem, block_rows));
        require_close(other.out.values(), largest.out.values(), 1e-5 + rounding,
                      type == ElementType::kFloat32 ? 0.0 : 2.0 * unit_roundoff(shape.query_type()));
        require_close(as_doubles(other.lse), as_doubles(largest.lse), 1e-5);
      }
    }
  }
}

TEST_CASE("Prefill of one token agrees with decode over the same stored tokens") {
  for (const Shape& shape : covering_shapes(32)) {
    CAPTURE(shape);
    const int64_t length = 3 * shape.page_size + shape.page_size / 2 + 1;
    const PagedProblem fresh(shape, {{length, 1}}, {{0, length - 1}}, 4);
    const PagedProblem stored(shape, {{length}}, {{0, length - 1}}, 4);
    const ExpectedAttention expected =
        expected_attention(stored);  // for what decode rounds and prefill does not
    for (const KernelTable* kernels : targets()) {
      CAPTURE(kernels->target);
      const Attention prefilled = prefill(*kernels, fresh, cut_blocks(fresh, 1));
      const Attention decoded = attend(*kernels, stored);
      require_close(prefilled.out.values(), decoded.out.values(),
                    1e-5 + probability_rounding(expected, *kernels, stored) +
                        decode_rounding(expected, *kernels, stored),
                    2.0 * unit_roundoff(shape.query_type()));
      require_close(as_doubles(prefilled.lse), as_doubles(decoded.lse), 1e-5 + expected.lse_rounding);
    }
  }
}

TEST_CASE("CPU targets agree on prefill within fp32 rounding") {
  const Shape shape{.page_size = 16, .head_dim = 128, .group_size = 7};
  const std::vector<Sequence> batch = prefill_batch(shape);
  std::vector<RowAt> rows = prefill_rows(batch);
  std::erase_if(rows, [](const RowAt& row) { return row.position < 0; });
  const PagedProblem problem(shape, batch, rows, 5);
  const std::vector<PrefillBlock> blocks = cut_blocks(problem, most_rows(shape));
  const Attention scalar = prefill(*targets().front(), problem, blocks);
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const Attention other = prefill(*kernels, problem, blocks);
    require_close(other.out.values(), scalar.out.values(), 1e-5);
    require_close(as_doubles(other.lse), as_doubles(scalar.lse), 1e-5);
  }
}
