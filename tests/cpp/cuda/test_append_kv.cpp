// The CUDA kernel of append_kv, on the emulator, against plain stores to the places that the batch and the
// layout give; the same tokens and pools as in the CPU's test.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/append_problem.h"
#include "../cpu/summaries.h"
#include "../cpu/virtual_memory.h"
#include "cuda/append_kv.h"
#include "cuda/seal_pages.h"
#include "cuda_emulator/testing.h"
#include "device_batch.h"

using namespace tinyserve::cpu::testing;
using tinyserve::core::AppendKvBatchParams;
using tinyserve::core::find_scorer;
using tinyserve::core::kScorers;
using tinyserve::core::PagePoolView;
using tinyserve::core::Scorer;
using tinyserve::cuda::emulator::same_under_every_schedule;
using tinyserve::cuda::testing::DeviceBatch;

namespace {

struct NewTokens {
  int32_t seq_len;
  int32_t count;
  std::vector<int32_t> pages;  // of the whole sequence
};

struct Batch : DeviceBatch {
  explicit Batch(const std::vector<NewTokens>& sequences) : DeviceBatch(longest(sequences)) {
    for (const NewTokens& sequence : sequences) add(sequence.seq_len, sequence.count, sequence.pages);
  }

  static int64_t longest(const std::vector<NewTokens>& sequences) {
    int64_t pages = 0;
    for (const NewTokens& sequence : sequences) {
      pages = std::max(pages, static_cast<int64_t>(sequence.pages.size()));
    }
    return pages;
  }

  int64_t num_tokens() const { return cu_query_lens.back(); }

  // Each token that has a place, by itself.
  std::vector<PageWrite> writes(int64_t page_size) const {
    std::vector<PageWrite> out;
    for (size_t s = 0; s < seq_lens.size(); ++s) {
      for (int32_t token = cu_query_lens[s]; token < cu_query_lens[s + 1]; ++token) {
        const int64_t position = seq_lens[s] + token - cu_query_lens[s];
        if (position < 0) continue;
        if (position / page_size >= max_pages) continue;
        const int32_t page_id = page_table[s * (max_pages + 1) + position / page_size];
        if (page_id < 0) continue;
        out.push_back({page_id, token, 1, static_cast<int32_t>(position % page_size)});
      }
    }
    return out;
  }
};

// The page writes of a problem, each as a sequence of one page.
Batch batch_of(const std::vector<PageWrite>& writes) {
  std::vector<NewTokens> sequences;
  for (const PageWrite& write : writes) {
    sequences.push_back({write.first_slot, write.num_tokens, {static_cast<int32_t>(write.page_id)}});
  }
  return Batch(sequences);
}

AppendKvBatchParams params_of(const Appending& appending, const Batch& batch, const EmptyPools& pools) {
  return {.k = appending.packed(1),
          .v = appending.packed(2),
          .batch = batch.view(),
          .num_tokens = appending.num_tokens,
          .num_kv_heads = appending.shape.num_kv_heads,
          .head_dim = appending.shape.head_dim,
          .page_size = appending.shape.page_size,
          .k_pages = pools.problem.k_pages,
          .v_pages = pools.problem.v_pages,
          .page_summary = {},
          .scorer = nullptr};
}

std::vector<uint8_t> bytes_of(const std::vector<float>& numbers) {
  const auto* begin = reinterpret_cast<const uint8_t*>(numbers.data());
  return {begin, begin + numbers.size() * sizeof(float)};
}

// The bytes of pools and summaries after an append.
struct Appended {
  std::vector<uint8_t> k_pages, v_pages, k_scales, v_scales, summaries;
  bool operator==(const Appended&) const = default;
};

Appended append(const Appending& appending, const Batch& batch, int64_t num_pages,
                const Scorer* scorer = nullptr) {
  return same_under_every_schedule([&] {
    EmptyPools pools(appending.shape, num_pages);
    Summaries summaries(*find_scorer("bounds"), pools.problem);
    AppendKvBatchParams params = params_of(appending, batch, pools);
    if (scorer != nullptr) {
      summaries = Summaries(*scorer, pools.problem);
      params.scorer = scorer;
      params.page_summary = summaries.view();
    }
    REQUIRE(tinyserve::cuda::append_kv(params, nullptr) == cudaSuccess);
    return Appended{pool_bytes(pools.problem.k_pages), pool_bytes(pools.problem.v_pages),
                    bytes_of(pools.problem.k_scales()), bytes_of(pools.problem.v_scales()), summaries.bytes};
  });
}

// Bit for bit, but for the bits of a NaN: conversions on a GPU have one NaN only.
void require_same_numbers(ElementType type, const std::vector<uint8_t>& actual,
                          const std::vector<uint8_t>& expected) {
  REQUIRE(actual.size() == expected.size());
  const auto size = static_cast<size_t>(tinyserve::core::element_size(type));
  for (size_t i = 0; i < actual.size(); i += size) {
    if (std::memcmp(&actual[i], &expected[i], size) == 0) continue;
    Elements pair(type, 2);
    std::memcpy(pair.data(), &actual[i], size);
    std::memcpy(pair.data() + size, &expected[i], size);
    if (std::isnan(pair.get(0)) && std::isnan(pair.get(1))) continue;
    FAIL("element " << i / size << ": got " << pair.get(0) << ", expected " << pair.get(1));
  }
}

void require_expected(const Appended& actual, const Appending& appending, int64_t num_pages) {
  const EmptyPools reference(appending.shape, num_pages);
  const ExpectedPool k = expected_pool(appending, reference, 1);
  const ExpectedPool v = expected_pool(appending, reference, 2);
  require_same_numbers(appending.shape.type, actual.k_pages, without_gap(k.pages));
  require_same_numbers(appending.shape.type, actual.v_pages, without_gap(v.pages));
  require_same_numbers(ElementType::kFloat32, actual.k_scales, bytes_of(k.scales));
  require_same_numbers(ElementType::kFloat32, actual.v_scales, bytes_of(v.scales));
}

// Several pages, ends in the middle of a page, no tokens, padding alone and in front, pages that the table
// does not name or does not reach, one token in the last slot, and more sequences than a warp has lanes.
Batch mixed_batch(int64_t page_size, int64_t num_single_tokens) {
  const auto slots = [&](int64_t pages, int64_t more = 0) {
    return static_cast<int32_t>(pages * page_size + more);
  };
  std::vector<NewTokens> sequences = {{0, 0, {}},
                                      {0, slots(2, page_size / 2), {7, 3, 11}},
                                      {slots(1, page_size - 1), slots(1, 1), {-1, 5, 0}},
                                      {-3, 3, {}},
                                      {-2, slots(1) + 2, {9}},
                                      {5, 0, {2}},
                                      {slots(1), slots(1, 1), {4, -1, 8}},
                                      {slots(3, -1), 2, {-1, -1, 6}}};
  for (int64_t i = 0; i < num_single_tokens; ++i) {
    sequences.push_back({static_cast<int32_t>(i % page_size), 1, {static_cast<int32_t>(12 + i)}});
  }
  return Batch(sequences);
}
constexpr int64_t kMixedPages = 12;

}  // namespace

TEST_CASE("Appended tokens land in their slots, converted, and nothing else changes") {
  for (const Shape& shape : covering_shapes(32)) {
    for (const ElementType source_type : kElementTypes) {
      CAPTURE(shape, static_cast<int>(source_type));
      const Appending appending(shape, source_type, 3);
      require_expected(append(appending, batch_of(appending.writes), 6), appending, 6);
    }
  }
}

TEST_CASE("A batch of any lengths is cut into pages on the device; padding and missing pages are skipped") {
  for (Shape shape : covering_shapes(12)) {
    shape.num_kv_heads = 5;  // the second block of heads is not full
    shape.page_size = std::min<int64_t>(shape.page_size, 16);
    for (const int64_t num_single_tokens : {0, 40}) {
      shape.channel_major = num_single_tokens == 0;
      const Batch batch = mixed_batch(shape.page_size, num_single_tokens);
      const int64_t num_pages = kMixedPages + num_single_tokens;
      CAPTURE(shape, num_single_tokens);
      // Four tokens behind the last sequence, as a captured graph may have them.
      const Appending appending(shape, shape.query_type(), 4, batch.num_tokens() + 4,
                                batch.writes(shape.page_size), /*heads_first=*/num_single_tokens == 0);
      require_expected(append(appending, batch, num_pages), appending, num_pages);
    }
  }
}

TEST_CASE("A page is summarised when its last slot is written, as seal_pages would, and no other") {
  for (const Scorer& scorer : kScorers) {
    if (!scorer.linear() && scorer.name != "low_rank_3") continue;
    for (Shape shape : covering_shapes(12)) {
      if (!fits(scorer, shape)) continue;
      shape.page_size = std::min<int64_t>(shape.page_size, 16);
      shape.channel_major = shape.head_dim % 64 != 0;
      CAPTURE(scorer.name, shape);
      const Batch batch = mixed_batch(shape.page_size, 3);
      const std::vector<PageWrite> writes = batch.writes(shape.page_size);
      const Appending appending(shape, shape.query_type(), 5, batch.num_tokens(), writes);
      const int64_t num_pages = kMixedPages + 3;
      const Appended appended = append(appending, batch, num_pages, &scorer);

      std::vector<int32_t> filled;
      for (const PageWrite& write : writes) {
        if (write.first_slot == shape.page_size - 1) filled.push_back(static_cast<int32_t>(write.page_id));
      }
      EmptyPools pools(shape, num_pages);
      REQUIRE(tinyserve::cuda::append_kv(params_of(appending, batch, pools), nullptr) == cudaSuccess);
      Summaries sealed(scorer, pools.problem);
      REQUIRE(tinyserve::cuda::seal_pages({.page_ids = filled.data(),
                                           .num_kv_heads = shape.num_kv_heads,
                                           .head_dim = shape.head_dim,
                                           .page_size = shape.page_size,
                                           .k_pages = pools.problem.k_pages,
                                           .page_summary = sealed.view(),
                                           .scorer = &scorer},
                                          static_cast<int64_t>(filled.size()), nullptr) == cudaSuccess);
      require_same_bits(appended.summaries, sealed.bytes);
    }
  }
}

TEST_CASE("Token by token and all at once leave the same bytes and summaries") {
  for (const Shape& shape : covering_shapes(16)) {
    const Scorer& scorer = *find_scorer(shape.page_size < 16 ? "bounds" : "low_rank_2");
    CAPTURE(shape);
    const auto length = static_cast<int32_t>(2 * shape.page_size + 1);
    const std::vector<int32_t> pages = {3, 0, 2};
    const Batch whole({{0, length, pages}});
    const Appending appending(shape, shape.query_type(), 6, length, whole.writes(shape.page_size));
    const Appended at_once = append(appending, whole, 6, &scorer);

    EmptyPools pools(shape);
    Summaries summaries(scorer, pools.problem);
    const int64_t element_size = tinyserve::core::element_size(appending.source.type());
    for (int32_t t = 0; t < length; ++t) {
      const Batch one({{t, 1, pages}});
      AppendKvBatchParams params = params_of(appending, one, pools);
      for (auto* packed : {&params.k, &params.v}) {
        packed->data = static_cast<const uint8_t*>(packed->data) + t * packed->token_stride * element_size;
      }
      params.num_tokens = 1;
      params.scorer = &scorer;
      params.page_summary = summaries.view();
      REQUIRE(tinyserve::cuda::append_kv(params, nullptr) == cudaSuccess);
    }
    require_same_bits(pool_bytes(pools.problem.k_pages), at_once.k_pages);
    require_same_bits(pool_bytes(pools.problem.v_pages), at_once.v_pages);
    require_same_bits(bytes_of(pools.problem.k_scales()), at_once.k_scales);
    require_same_bits(summaries.bytes, at_once.summaries);
  }
}

TEST_CASE("Pages beyond 2^31 elements, and summaries beyond 2^31 bytes, are written like any other") {
  for (const ElementType type : {ElementType::kFloat16, ElementType::kInt8}) {
    for (const bool channel_major : {false, true}) {
      CAPTURE(static_cast<int>(type), channel_major);
      const Shape shape{.type = type, .page_size = 16, .head_dim = 64, .channel_major = channel_major};
      const Scorer& scorer = *find_scorer("bounds");
      const Batch near_batch({{0, 20, {4, 1}}});
      const Appending appending(shape, shape.query_type(), 7, 20, near_batch.writes(16));
      const Appended expected = append(appending, near_batch, 6, &scorer);

      // The same pools, their pages farther apart; memory comes into being where it is touched.
      constexpr int64_t kFarStride = int64_t{1} << 30;
      EmptyPools pools(shape);
      Summaries summaries(scorer, pools.problem);
      AppendKvBatchParams params = params_of(appending, near_batch, pools);
      const int64_t element_size = tinyserve::core::element_size(type);
      const VirtualMemory keys(static_cast<size_t>(6 * kFarStride * element_size));
      const VirtualMemory values(static_cast<size_t>(6 * kFarStride * element_size));
      const VirtualMemory key_scales(static_cast<size_t>(6 * kFarStride * 4));
      const VirtualMemory value_scales(static_cast<size_t>(6 * kFarStride * 4));
      const VirtualMemory summary(static_cast<size_t>(6 * kFarStride));
      const auto move = [&](PagePoolView& pool, const VirtualMemory& memory, const VirtualMemory& scales) {
        pool.data = memory.begin();
        pool.page_stride = kFarStride;
        if (type != ElementType::kInt8) return;
        pool.scales = static_cast<float*>(scales.begin());
        pool.scale_page_stride = kFarStride;
      };
      move(params.k_pages, keys, key_scales);
      move(params.v_pages, values, value_scales);
      params.page_summary = {.data = static_cast<uint8_t*>(summary.begin()),
                             .page_stride = kFarStride,
                             .head_stride = summaries.row_bytes()};
      params.scorer = &scorer;
      REQUIRE(tinyserve::cuda::append_kv(params, nullptr) == cudaSuccess);

      const auto require_same_page = [&](const PagePoolView& far_pool, const PagePoolView& near_pool,
                                         const std::vector<uint8_t>& bytes, int64_t page, int64_t tokens) {
        const auto* far_data = static_cast<const uint8_t*>(far_pool.data);
        for (int64_t i = 0; i < tokens * shape.num_kv_heads * shape.head_dim; ++i) {
          const int64_t d = i % shape.head_dim;
          const int64_t head = i / shape.head_dim % shape.num_kv_heads;
          const int64_t slot = i / shape.head_dim / shape.num_kv_heads;
          const int64_t there = pools.problem.offset(far_pool, page, head, slot, d) * element_size;
          const int64_t here = pools.problem.offset(near_pool, page, head, slot, d) * element_size;
          REQUIRE(std::memcmp(far_data + there, &bytes[here], static_cast<size_t>(element_size)) == 0);
        }
      };
      for (const auto& [page, tokens] : {std::pair<int64_t, int64_t>{4, 16}, {1, 4}}) {
        require_same_page(params.k_pages, pools.problem.k_pages, expected.k_pages, page, tokens);
        require_same_page(params.v_pages, pools.problem.v_pages, expected.v_pages, page, tokens);
      }
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        const int64_t row_bytes = summaries.row_bytes();
        REQUIRE(std::memcmp(params.page_summary.row(4, head),
                            &expected.summaries[(4 * shape.num_kv_heads + head) * row_bytes],
                            static_cast<size_t>(row_bytes)) == 0);
      }
    }
  }
}

TEST_CASE("An empty batch launches nothing") {
  const Shape shape;
  const Batch batch({{0, 0, {0}}});
  const Appending appending(shape, shape.type, 8, 1, {});
  EmptyPools pools(shape);
  AppendKvBatchParams params = params_of(appending, batch, pools);
  params.num_tokens = 0;
  REQUIRE(tinyserve::cuda::append_kv(params, nullptr) == cudaSuccess);
}
