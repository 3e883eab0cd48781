// The CUDA kernel of attend_pages, on the emulator: against attention's definition, with the problems of the
// CPU's tests, and against itself where the result may not depend on the way it was come by.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "../cpu/attention_oracle.h"
#include "../cpu/page_lists.h"
#include "../cpu/virtual_memory.h"
#include "cuda/attend_chunks.h"
#include "cuda/attend_pages.h"
#include "cuda_emulator/testing.h"
#include "device_batch.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::AttendPagesBatchParams;
using tinyserve::core::PagePoolView;
using tinyserve::cuda::emulator::kSchedules;
using tinyserve::cuda::emulator::same_under_every_schedule;
using tinyserve::cuda::emulator::ScheduleScope;
using tinyserve::cuda::testing::DeviceBatch;

namespace {

// Rows of a problem as a batch, each a sequence of one new token.
DeviceBatch batch_of(const PagedProblem& problem, const std::vector<int64_t>& rows) {
  int64_t max_pages = 0;
  for (const auto& table : problem.page_tables) {
    max_pages = std::max(max_pages, static_cast<int64_t>(table.size()));
  }
  DeviceBatch batch(max_pages);
  for (const int64_t row : rows) {
    const RowAt& place = problem.row_places[row];
    batch.add(place.position, 1, problem.page_tables[place.sequence]);
  }
  return batch;
}

std::vector<int64_t> all_rows(const PagedProblem& problem) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.num_rows()));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// A launch and all the memory it takes.
struct Launch {
  const PagedProblem& problem;
  std::vector<int64_t> rows;  // of the problem
  DeviceBatch batch;
  PageLists lists;
  Elements q;
  Attention result;
  std::vector<float> partials;
  std::vector<int32_t> chunks_done;
  AttendPagesBatchParams params;

  Launch(const PagedProblem& of, const std::vector<int64_t>& chosen_rows,
         const PageLists* wanted_lists = nullptr, bool with_page_lse = false, int64_t spare_chunks = 0)
      : problem(of), rows(chosen_rows), batch(batch_of(of, chosen_rows)) {
    const Shape& shape = problem.shape;
    const auto num_rows = static_cast<int64_t>(rows.size());
    const int64_t num_row_heads = num_rows * shape.num_kv_heads;
    const int64_t width = wanted_lists != nullptr ? wanted_lists->width : max_visible_pages(problem);
    lists.width = width;
    const int64_t q_bytes = problem.q.token_stride * tinyserve::core::element_size(shape.query_type());
    q = Elements(shape.query_type(), num_rows * problem.q.token_stride);
    for (int64_t r = 0; r < num_rows; ++r) {
      std::memcpy(q.data() + r * q_bytes, static_cast<const uint8_t*>(problem.q.data) + rows[r] * q_bytes,
                  static_cast<size_t>(q_bytes));
      if (wanted_lists == nullptr) continue;
      const int64_t heads = shape.num_kv_heads;
      const auto pages = wanted_lists->pages.begin() + rows[r] * heads * width;
      lists.pages.insert(lists.pages.end(), pages, pages + heads * width);
      const auto counts = wanted_lists->counts.begin() + rows[r] * heads;
      lists.counts.insert(lists.counts.end(), counts, counts + heads);
    }
    const int64_t max_chunks = tinyserve::cuda::max_chunks(width, shape.page_size) + spare_chunks;
    const int64_t num_heads = num_rows * shape.num_heads();
    result.out = Elements(shape.query_type(), num_heads * shape.head_dim);
    result.lse.assign(num_heads, static_cast<float>(kNan));
    if (with_page_lse) result.page_lse.assign(num_heads * width, -static_cast<float>(kInfinity));
    partials.assign(num_heads * max_chunks * (shape.head_dim + 2), static_cast<float>(kNan));
    chunks_done.assign(num_row_heads, 0);
    params = {.attend = {.q = {q.data(), q.type(), problem.q.token_stride, problem.q.head_stride},
                         .rows = nullptr,
                         .num_kv_heads = shape.num_kv_heads,
                         .group_size = shape.group_size,
                         .head_dim = shape.head_dim,
                         .page_size = shape.page_size,
                         .k_pages = problem.k_pages,
                         .v_pages = problem.v_pages,
                         .selected_pages = wanted_lists != nullptr ? lists.pages.data() : nullptr,
                         .num_selected = wanted_lists != nullptr ? lists.counts.data() : nullptr,
                         .list_width = width,
                         .max_chunks = max_chunks,
                         .sm_scale = shape.sm_scale(),
                         .partials = partials.data(),
                         .chunks_done = chunks_done.data(),
                         .page_lse = with_page_lse ? result.page_lse.data() : nullptr,
                         .out = result.out.data(),
                         .lse = result.lse.data()},
              .batch = batch.view(),
              .num_rows = num_rows,
              .window = shape.window};
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void run() {
    REQUIRE(tinyserve::cuda::attend_pages(params, nullptr) == cudaSuccess);
    // For the next launch.
    REQUIRE(std::ranges::all_of(chunks_done, [](int32_t count) { return count == 0; }));
  }
};

// One launch under a schedule that the arguments choose.
Attention attend_once(const PagedProblem& problem, const PageLists* lists = nullptr,
                      bool with_page_lse = false, int64_t spare_chunks = 0) {
  const auto& shape = problem.shape;
  const ScheduleScope scope(
      kSchedules[static_cast<size_t>(shape.head_dim / 8 + shape.page_size + spare_chunks) %
                 std::size(kSchedules)]);
  Launch launch(problem, all_rows(problem), lists, with_page_lse, spare_chunks);
  launch.run();
  return std::move(launch.result);
}

std::vector<uint8_t> bits_of(const Attention& attention) {
  std::vector<uint8_t> bits = attention.out.bytes();
  for (const auto* numbers : {&attention.lse, &attention.page_lse}) {
    const auto* begin = reinterpret_cast<const uint8_t*>(numbers->data());
    bits.insert(bits.end(), begin, begin + numbers->size() * sizeof(float));
  }
  return bits;
}

// Whether a problem is for tensor cores, which round probabilities to the type of the pages.
bool on_tensor_cores(const PagedProblem& problem) {
  const Shape& shape = problem.shape;
  return (shape.type == ElementType::kFloat16 || shape.type == ElementType::kBFloat16) &&
         (shape.head_dim == 64 || shape.head_dim == 128);
}

// What an output may be off by beyond fp32 rounding. A probability is off by at most a unit roundoff of
// itself and their sum is right, so the output moves by at most that share of the largest value.
// Probabilities below the normal numbers of fp16 lose 2^-25.
double probability_rounding(const PagedProblem& problem) {
  if (!on_tensor_cores(problem)) return 0.0;
  const Shape& shape = problem.shape;
  double largest = 0.0;
  for (size_t s = 0; s < problem.sequences.size(); ++s) {
    const float* values = problem.value(static_cast<int64_t>(s), 0, 0);
    for (int64_t i = 0; i < shape.num_kv_heads * problem.sequences[s].length * shape.head_dim; ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(values[i])));
    }
  }
  return 1.02 * (unit_roundoff(shape.type) + 0x1p-20) * largest;
}

// fp32 products of codes and fp32 scales: int8 pages need no tolerance of their own.
void require_close_attention(const PagedProblem& problem, const Attention& actual,
                             const ExpectedAttention& expected) {
  require_close_outputs(actual.out, expected.out, probability_rounding(problem));
  require_close(as_doubles(actual.lse), expected.lse, 3e-5);
  if (!actual.page_lse.empty()) require_close(as_doubles(actual.page_lse), expected.page_lse, 3e-5);
}

// Row r of `batched` is row rows[r] of `all`.
void require_same_rows(const Attention& batched, const std::vector<int64_t>& rows, const Attention& all) {
  const size_t row_bytes = all.out.bytes().size() / (all.lse.size() / (batched.lse.size() / rows.size()));
  const size_t row_heads = batched.lse.size() / rows.size();
  for (size_t r = 0; r < rows.size(); ++r) {
    CAPTURE(r);
    const auto row = static_cast<size_t>(rows[r]);
    const uint8_t* out = batched.out.data() + r * row_bytes;
    REQUIRE(std::memcmp(out, all.out.data() + row * row_bytes, row_bytes) == 0);
    REQUIRE(std::memcmp(&batched.lse[r * row_heads], &all.lse[row * row_heads], row_heads * sizeof(float)) ==
            0);
  }
}

}  // namespace

TEST_CASE("CUDA attention follows its definition for every type, layout and shape") {
  for (const Shape& shape : covering_shapes()) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 1);
    const ExpectedAttention expected = expected_attention(problem, nullptr, max_visible_pages(problem));
    require_close_attention(problem, attend_once(problem, nullptr, /*with_page_lse=*/true), expected);
  }
}

TEST_CASE("CUDA attention over page lists sees the listed pages only") {
  for (const Shape& shape : covering_shapes(32)) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 2);
    const PageLists lists = draw_lists(problem, 18, 3);
    const ExpectedAttention expected = expected_attention(problem, &lists, lists.width);
    require_close_attention(problem, attend_once(problem, &lists, /*with_page_lse=*/true), expected);
  }
}

TEST_CASE("Large groups and head dims have the same definition") {
  for (const int64_t group_size : {8, 12, 16, 20}) {
    for (const int64_t head_dim : {64, 96, 128, 256}) {
      const ElementType small = head_dim == 64 ? ElementType::kBFloat16 : ElementType::kFloat16;
      const Shape shape{.type = group_size == 12 ? ElementType::kInt8 : small,
                        .page_size = 16,
                        .head_dim = head_dim,
                        .group_size = group_size,
                        .num_kv_heads = 1};
      CAPTURE(shape);
      const PagedProblem problem(shape, {{150}, {40}}, {{0, 149}, {1, 39}}, 3);
      require_close_attention(problem, attend_once(problem), expected_attention(problem));
    }
  }
}

TEST_CASE("No order of threads and blocks changes a bit of CUDA attention") {
  for (const Shape& shape : covering_shapes(16)) {
    if (shape.page_size == 64) continue;  // slow, and like 16 otherwise
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 4);
    const PageLists lists = draw_lists(problem, 20, 5);
    same_under_every_schedule([&] {
      Launch launch(problem, all_rows(problem), &lists, /*with_page_lse=*/true);
      launch.run();
      return bits_of(launch.result);
    });
  }
}

TEST_CASE("A list of all visible pages gives the bits of dense CUDA attention") {
  for (const Shape& shape : covering_shapes(24)) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 6);
    const PageLists lists = full_lists(problem, max_visible_pages(problem) + 20);
    const Attention dense = attend_once(problem);
    require_same_attention(attend_once(problem, &lists), dense);
    require_same_attention(attend_once(problem, nullptr, /*with_page_lse=*/true), dense);
    require_same_attention(attend_once(problem, nullptr, false, /*spare_chunks=*/2), dense);
  }
}

TEST_CASE("The order of a batch, and whether there is one, changes no bit of a row") {
  for (const Shape& shape : covering_shapes(12)) {
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 7);
    Launch batched(problem, all_rows(problem));
    batched.run();
    std::vector<int64_t> shuffled = all_rows(problem);
    std::ranges::shuffle(shuffled, std::mt19937(shape.head_dim));
    Launch other(problem, shuffled);
    other.run();
    require_same_rows(other.result, shuffled, batched.result);
    for (const int64_t row : {0, 1, 4}) {
      Launch solo(problem, {row});
      solo.run();
      require_same_rows(solo.result, {row}, batched.result);
    }
  }
}

TEST_CASE("Every length around a page's end is attended to exactly, and an empty row gives zeros") {
  for (const int64_t page_size : {1, 4, 8, 16, 24, 32, 64}) {
    const Shape shape{.type = page_size % 3 == 0 ? ElementType::kInt8 : ElementType::kBFloat16,
                      .page_size = page_size,
                      .head_dim = 64,
                      .group_size = 2,
                      .num_kv_heads = 1};
    CAPTURE(shape);
    std::vector<Sequence> batch;
    for (const int64_t full_pages : {0, 1, 3}) {
      for (int64_t rest = 0; rest <= page_size; ++rest) {
        if (full_pages > 0 || rest > 0 || batch.empty()) batch.push_back({full_pages * page_size + rest});
      }
    }
    std::vector<RowAt> rows;
    for (size_t s = 0; s < batch.size(); ++s) rows.push_back({static_cast<int32_t>(s), batch[s].length - 1});
    const PagedProblem problem(shape, batch, rows, 8);
    const Attention actual = attend_once(problem, nullptr, /*with_page_lse=*/true);
    require_close_attention(problem, actual,
                            expected_attention(problem, nullptr, max_visible_pages(problem)));
    for (int64_t i = 0; i < shape.num_heads() * shape.head_dim; ++i) REQUIRE(actual.out.get(i) == 0.0);
    REQUIRE(actual.lse[0] == -static_cast<float>(kInfinity));
  }
}

TEST_CASE("Nothing but the visible tokens of the listed pages reaches CUDA attention") {
  for (const Shape& shape : covering_shapes(32)) {
    if (shape.page_size == 64) continue;  // slow, and like 16 otherwise
    CAPTURE(shape);
    const PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 17);
    const PageLists lists = draw_lists(problem, 6, 18);
    for (const int64_t row : {0, 4}) {
      Launch launch(problem, {row}, &lists);
      launch.run();
      // The same launch on pools of NaN, to which only what the row may see was copied.
      Launch bare(problem, {row}, &lists);
      const int64_t size = tinyserve::core::element_size(shape.type);
      Elements storage[2];
      std::vector<float> scales[2];
      PagePoolView* pools[] = {&bare.params.attend.k_pages, &bare.params.attend.v_pages};
      for (int i = 0; i < 2; ++i) {
        const PagePoolView pool = *pools[i];
        storage[i] = Elements(shape.type, pool.num_pages * pool.page_stride);
        scales[i].assign(pool.num_pages * pool.scale_page_stride, static_cast<float>(kNan));
        pools[i]->data = storage[i].data();
        if (pool.scales != nullptr) pools[i]->scales = scales[i].data();
        for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
          for (const int64_t page : pages_of(problem, &lists, row, head)) {
            const int64_t page_id = problem.page_tables[problem.row_places[row].sequence][page];
            for (int64_t slot = 0; slot < shape.page_size; ++slot) {
              if (!problem.sees(row, page * shape.page_size + slot)) continue;
              for (int64_t d = 0; d < shape.head_dim; ++d) {
                const int64_t bytes = problem.offset(pool, page_id, head, slot, d) * size;
                std::memcpy(storage[i].data() + bytes, static_cast<uint8_t*>(pool.data) + bytes,
                            static_cast<size_t>(size));
              }
              if (pool.scales == nullptr) continue;
              pools[i]->token_scales(page_id, head)[slot] = pool.token_scales(page_id, head)[slot];
            }
          }
        }
      }
      bare.run();
      require_same_attention(bare.result, launch.result);
    }
  }
}

TEST_CASE("Lists longer than 64 chunks are cut into larger ones") {
  using tinyserve::cuda::chunk_pages;
  using tinyserve::cuda::max_chunks;
  for (const int64_t page_size : {1, 7, 16, 64}) {
    for (const int64_t num_pages : {0, 1, 100, 511, 512, 513, 8192, 8193, 70000}) {
      const int64_t chunks = tinyserve::cuda::ceil_div(num_pages, chunk_pages(num_pages, page_size));
      REQUIRE(chunks <= max_chunks(num_pages, page_size));
      REQUIRE(max_chunks(num_pages, page_size) <= 64);
      REQUIRE(max_chunks(num_pages, page_size) <= max_chunks(num_pages + 1, page_size));
    }
  }
  const Shape shape{.page_size = 1, .head_dim = 8, .group_size = 1, .num_kv_heads = 1};
  const PagedProblem problem(shape, {{64 * 128 + 5}}, {{0, 64 * 128 + 4}, {0, 64 * 128 - 1}}, 9);
  require_close_attention(problem, attend_once(problem), expected_attention(problem));
}

TEST_CASE(
    "Rows of sequences with several tokens or none are found, and padding behind the last gives zeros") {
  const Shape shape{.page_size = 7, .head_dim = 40, .group_size = 3};
  // Four rows of one sequence; 37 sequences without a token lie between the third and the fourth.
  const PagedProblem problem(shape, {{30}, {9}}, {{0, 27}, {0, 28}, {0, 29}, {1, 8}, {1, -1}}, 10);
  const Attention expected = attend_once(problem);
  Launch launch(problem, all_rows(problem));
  DeviceBatch batch = batch_of(problem, {});
  batch.add(27, 3, problem.page_tables[0]);
  for (int i = 0; i < 37; ++i) batch.add(100, 0);
  batch.add(8, 1, problem.page_tables[1]);
  launch.params.batch = batch.view();
  launch.run();
  require_same_attention(launch.result, expected);
}

TEST_CASE("How far rows of pages are aligned changes no bit") {
  for (const ElementType type : kPageTypes) {
    for (const int64_t head_dim : {40, 64, 128}) {
      const Shape shape{.type = type, .page_size = 16, .head_dim = head_dim, .group_size = 3};
      CAPTURE(shape);
      const PagedProblem problem(shape, {{100}}, {{0, 99}}, 11);
      Launch launch(problem, {0});
      launch.run();
      const Attention expected = std::move(launch.result);
      const int64_t size = tinyserve::core::element_size(type);
      // Gaps, in elements, before the pool and behind each page.
      for (const int64_t gap : {16, 8, 1}) {
        CAPTURE(gap);
        Elements storage[2];
        Launch moved(problem, {0});
        for (PagePoolView* pool : {&moved.params.attend.k_pages, &moved.params.attend.v_pages}) {
          Elements& to = storage[pool == &moved.params.attend.v_pages ? 1 : 0];
          const int64_t page_elements = pool->page_stride - 8;
          const int64_t stride = page_elements + gap;
          to = Elements(type, gap + pool->num_pages * stride);
          for (int64_t page = 0; page < pool->num_pages; ++page) {
            std::memcpy(to.data() + (gap + page * stride) * size,
                        static_cast<uint8_t*>(pool->data) + page * pool->page_stride * size,
                        static_cast<size_t>(page_elements * size));
          }
          pool->data = to.data() + gap * size;
          pool->page_stride = stride;
        }
        moved.run();
        require_same_attention(moved.result, expected);
      }
    }
  }
}

TEST_CASE("Pages beyond 2^31 elements are attended to like any other") {
  constexpr int64_t kFarPage = (int64_t{1} << 31) / 1024 + 5;  // pages of more than 1024 elements
  for (const ElementType type : {ElementType::kFloat16, ElementType::kInt8}) {
    for (const bool channel_major : {false, true}) {
      const Shape shape{.type = type, .page_size = 16, .head_dim = 64, .channel_major = channel_major};
      CAPTURE(shape);
      const PagedProblem problem(shape, {{40}}, {{0, 39}}, 12);
      Launch launch(problem, {0});
      launch.run();
      Launch far(problem, {0});
      const int64_t size = tinyserve::core::element_size(type);
      const auto bytes =
          static_cast<size_t>((kFarPage + problem.num_pages) * problem.k_pages.page_stride * 4);
      const VirtualMemory memory[] = {VirtualMemory(bytes), VirtualMemory(bytes), VirtualMemory(bytes),
                                      VirtualMemory(bytes)};
      int next = 0;
      for (PagePoolView* pool : {&far.params.attend.k_pages, &far.params.attend.v_pages}) {
        const int64_t page_bytes = pool->page_stride * size;
        REQUIRE(kFarPage * pool->page_stride > int64_t{1} << 31);
        auto* moved = static_cast<uint8_t*>(memory[next++].begin());
        std::memcpy(moved + kFarPage * page_bytes, pool->data,
                    static_cast<size_t>(pool->num_pages * page_bytes - 8 * size));
        pool->data = moved;
        if (type != ElementType::kInt8) continue;
        auto* scales = static_cast<float*>(memory[next++].begin());
        for (int64_t page = 0; page < problem.num_pages; ++page) {
          std::memcpy(scales + (kFarPage + page) * pool->page_stride,
                      pool->scales + page * pool->scale_page_stride,
                      sizeof(float) * static_cast<size_t>(pool->scale_page_stride));
        }
        pool->scales = scales;
        pool->scale_page_stride = pool->page_stride;
      }
      for (int32_t& page_id : far.batch.page_table) {
        if (page_id >= 0) page_id += static_cast<int32_t>(kFarPage);
      }
      far.run();
      require_same_attention(far.result, launch.result);
    }
  }
}

TEST_CASE("Launches one after the other may share partial results and counters") {
  const Shape shape{.type = ElementType::kFloat16, .page_size = 4, .head_dim = 64, .group_size = 4};
  const PagedProblem problem(shape, {{700}, {300}}, {{0, 699}, {1, 299}, {0, 400}, {1, -1}}, 13);
  const PageLists lists = draw_lists(problem, 70, 14);
  const Attention sparse = attend_once(problem, &lists);
  Launch dense(problem, all_rows(problem));
  dense.run();
  for (int i = 0; i < 3; ++i) {
    const ScheduleScope scope(kSchedules[2 + i]);
    Launch other(problem, all_rows(problem), &lists);
    other.params.attend.partials = dense.partials.data();  // full of the results of longer lists
    other.params.attend.chunks_done = dense.chunks_done.data();
    other.run();
    require_same_attention(other.result, sparse);
    dense.run();
  }
}

TEST_CASE("Large logits neither overflow nor lose the small ones of their chunk in CUDA attention") {
  for (const Shape& shape : {Shape{.page_size = 1, .head_dim = 8, .group_size = 1, .num_kv_heads = 1},
                             Shape{.type = ElementType::kFloat16,
                                   .page_size = 1,
                                   .head_dim = 64,
                                   .group_size = 1,
                                   .num_kv_heads = 1}}) {
    CAPTURE(shape);
    PagedProblem problem(shape, {{300}}, {{0, 299}}, 15);
    for (int64_t d = 0; d < shape.head_dim; ++d) problem.set_query(0, 0, d, d == 0 ? 1.0 : 0.0);
    // All chunks but the last are far below it; within a chunk the logits differ by one.
    for (int64_t token = 0; token < 300; ++token) {
      const double logit = (token < 292 ? -1000.0 : 1000.0) + static_cast<double>(token % 2);
      problem.set_key(0, 0, token, 0, logit / shape.sm_scale());
    }
    const Attention actual = attend_once(problem, nullptr, /*with_page_lse=*/true);
    const double expected_lse = 1000.0 + std::log(4.0 * (1.0 + std::exp(1.0)));
    require_close(as_doubles(actual.lse), std::vector{expected_lse}, 1e-3);
    double weighted = 0.0;
    for (int64_t token = 292; token < 300; ++token) {
      weighted +=
          problem.value(0, 0, token)[0] * std::exp(1000.0 + static_cast<double>(token % 2) - expected_lse);
    }
    REQUIRE(std::fabs(actual.out.get(0) - weighted) < 1e-3 + probability_rounding(problem));
    REQUIRE(std::fabs(actual.page_lse[0] - -1000.0) < 1e-3);
  }
}

TEST_CASE("Queries of another type than the pages are not rounded to it, nor are their probabilities") {
  for (const int64_t head_dim : {64, 128}) {
    const Shape shape{.type = ElementType::kBFloat16,
                      .page_size = 16,
                      .head_dim = head_dim,
                      .group_size = 5,
                      .num_kv_heads = 1};
    CAPTURE(shape);
    PagedProblem problem(shape, {{50}}, {{0, 49}}, 19);
    ExpectedAttention expected = expected_attention(problem);
    Launch launch(problem, {0});
    Elements q(ElementType::kFloat32, launch.q.size());
    for (int64_t i = 0; i < q.size(); ++i) q.set(i, launch.q.get(i));
    // A third of the queries' last place: bf16 would lose it.
    const double more = 1.0 + 0x1p-10;
    for (int64_t i = 0; i < q.size(); ++i) q.set(i, more * q.get(i));
    launch.result.out = Elements(ElementType::kFloat32, launch.result.out.size());
    launch.params.attend.q.data = q.data();
    launch.params.attend.q.type = ElementType::kFloat32;
    launch.params.attend.sm_scale /= static_cast<float>(more);
    launch.params.attend.out = launch.result.out.data();
    launch.run();
    require_close_outputs(launch.result.out, expected.out);
    require_close(as_doubles(launch.result.lse), expected.lse, 3e-5);
  }
}

TEST_CASE("A NaN key, or scale, makes the rows that see it NaN in CUDA attention, and no others") {
  for (const ElementType type : {ElementType::kFloat16, ElementType::kInt8}) {
    for (const bool channel_major : {false, true}) {
      const Shape shape{.type = type,
                        .page_size = 7,
                        .head_dim = channel_major ? 40 : 64,
                        .group_size = 3,
                        .channel_major = channel_major};
      CAPTURE(shape);
      PagedProblem problem(shape, decode_batch(shape), decode_rows(shape), 16);
      const Attention clean = attend_once(problem);
      std::vector<double> key(static_cast<size_t>(shape.head_dim), 1.0);
      key[3] = kNan;
      problem.set_key_row(1, 0, 9, key);
      const Attention actual = attend_once(problem);
      for (int64_t i = 0; i < problem.num_rows() * shape.num_heads(); ++i) {
        const bool touched = i / shape.num_heads() == 1 && i % shape.num_heads() < shape.group_size;
        const bool same = actual.lse[i] == clean.lse[i];
        if (touched ? !std::isnan(actual.lse[i]) : !same) FAIL("lse " << actual.lse[i] << " at " << i);
        if (touched != std::isnan(actual.out.get(i * shape.head_dim))) FAIL("out at head " << i);
      }
    }
  }
}
