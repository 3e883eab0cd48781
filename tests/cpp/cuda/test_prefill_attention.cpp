// The CUDA kernel of prefill_attention, on the emulator: against attention's definition, with the problems of
// the CPU's tests.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../cpu/attention_oracle.h"
#include "../cpu/prefill_problem.h"
#include "cuda/prefill_attention.h"
#include "cuda_emulator/testing.h"
#include "device_batch.h"

using namespace tinyserve::cpu::testing;
using tinyserve::cuda::emulator::kSchedules;
using tinyserve::cuda::emulator::same_under_every_schedule;
using tinyserve::cuda::emulator::ScheduleScope;
using tinyserve::cuda::testing::DeviceBatch;

namespace {

// Sequences of prefill_batch; the last begins with two padding slots. Tables hold the stored pages only.
DeviceBatch batch_of(const PagedProblem& problem) {
  int64_t max_pages = 0;
  for (const Sequence& sequence : problem.sequences) {
    max_pages = std::max(max_pages, (sequence.length - sequence.num_new) / problem.shape.page_size + 1);
  }
  DeviceBatch batch(max_pages);
  for (size_t s = 0; s < problem.sequences.size(); ++s) {
    const Sequence& sequence = problem.sequences[s];
    const auto num_rows = static_cast<int32_t>(std::ranges::count_if(
        problem.row_places, [&](const RowAt& row) { return row.sequence == static_cast<int32_t>(s); }));
    std::vector<int32_t> table = problem.page_tables[s];
    table.resize(std::min(table.size(), static_cast<size_t>(max_pages)));
    batch.add(sequence.length - num_rows, num_rows, table);
  }
  return batch;
}

Attention prefill(const PagedProblem& problem) {
  const Shape& shape = problem.shape;
  const Packed packed = pack_new_tokens(problem);
  const DeviceBatch batch = batch_of(problem);
  Attention result{
      .out = Elements(shape.query_type(), problem.num_rows() * shape.num_heads() * shape.head_dim),
      .lse = std::vector<float>(problem.num_rows() * shape.num_heads(), static_cast<float>(kNan)),
      .page_lse = {}};
  const tinyserve::core::PrefillAttentionBatchParams params{.attention = {.q = problem.q,
                                                                          .k = packed.k,
                                                                          .v = packed.v,
                                                                          .blocks = nullptr,
                                                                          .num_kv_heads = shape.num_kv_heads,
                                                                          .group_size = shape.group_size,
                                                                          .head_dim = shape.head_dim,
                                                                          .page_size = shape.page_size,
                                                                          .k_pages = problem.k_pages,
                                                                          .v_pages = problem.v_pages,
                                                                          .window = shape.window,
                                                                          .sm_scale = shape.sm_scale(),
                                                                          .out = result.out.data(),
                                                                          .lse = result.lse.data()},
                                                            .batch = batch.view(),
                                                            .num_rows = problem.num_rows()};
  REQUIRE(tinyserve::cuda::prefill_attention(params, nullptr) == cudaSuccess);
  return result;
}

std::vector<uint8_t> bits_of(const Attention& attention) {
  std::vector<uint8_t> bits = attention.out.bytes();
  const auto* begin = reinterpret_cast<const uint8_t*>(attention.lse.data());
  bits.insert(bits.end(), begin, begin + attention.lse.size() * sizeof(float));
  return bits;
}

}  // namespace

TEST_CASE("CUDA prefill follows attention's definition for every type, layout and shape") {
  const std::vector<Shape> shapes = covering_shapes(32);
  for (size_t i = 0; i < shapes.size(); i += 3) {  // all types, page sizes and layouts; the rest takes long
    const Shape& shape = shapes[i];
    CAPTURE(shape);
    const std::vector<Sequence> batch = prefill_batch(shape);
    const PagedProblem problem(shape, batch, prefill_rows(batch), 1);
    const ExpectedAttention expected = expected_attention(problem);
    const ScheduleScope scope(kSchedules[static_cast<size_t>(shape.head_dim / 8) % std::size(kSchedules)]);
    const Attention actual = prefill(problem);
    require_close_outputs(actual.out, expected.out);
    require_close(as_doubles(actual.lse), expected.lse, 3e-5);
  }
}

TEST_CASE("No order of threads and blocks changes a bit of CUDA prefill") {
  for (const Shape& shape :
       {Shape{.type = ElementType::kInt8, .page_size = 7, .head_dim = 40, .group_size = 5},
        Shape{.page_size = 16, .head_dim = 64, .group_size = 1, .window = 13}}) {
    CAPTURE(shape);
    const std::vector<Sequence> batch = prefill_batch(shape);
    const PagedProblem problem(shape, batch, prefill_rows(batch), 2);
    same_under_every_schedule([&] { return bits_of(prefill(problem)); });
  }
}
