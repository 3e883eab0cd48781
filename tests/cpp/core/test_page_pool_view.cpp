// The addresses of pages and summaries against an element count over the logical shape.
#include "core/page_pool_view.h"

#include <catch2/catch_test_macros.hpp>

#include <sys/mman.h>

#include <cstdint>
#include <numeric>
#include <vector>

using namespace tinyserve::core;

namespace {

constexpr int64_t kPages = 3, kHeads = 2, kPageSize = 4, kHeadDim = 8;

}  // namespace

TEST_CASE("A page's address and the strides lead to every element once, in both layouts") {
  std::vector<float> storage(kPages * kHeads * kPageSize * kHeadDim);
  std::iota(storage.begin(), storage.end(), 0.0F);
  for (const bool channel_major : {false, true}) {
    const PagePoolView view{.data = storage.data(),
                            .type = ElementType::kFloat32,
                            .num_pages = kPages,
                            .page_stride = kHeads * kPageSize * kHeadDim,
                            .head_stride = kPageSize * kHeadDim,
                            .token_stride = channel_major ? 1 : kHeadDim,
                            .channel_stride = channel_major ? kPageSize : 1};
    REQUIRE(view.channel_major() == channel_major);
    for (int64_t page = 0; page < kPages; ++page) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t t = 0; t < kPageSize; ++t) {
          for (int64_t d = 0; d < kHeadDim; ++d) {
            const int64_t in_page = channel_major ? d * kPageSize + t : t * kHeadDim + d;
            const auto expected = static_cast<float>((page * kHeads + head) * kPageSize * kHeadDim + in_page);
            REQUIRE(view.page<float>(page, head)[t * view.token_stride + d * view.channel_stride] ==
                    expected);
          }
        }
      }
    }
  }
}

TEST_CASE("Strides count elements of the page's type") {
  std::vector<uint16_t> storage(64);
  const PagePoolView view{.data = storage.data(),
                          .type = ElementType::kFloat16,
                          .num_pages = 4,
                          .page_stride = 16,
                          .head_stride = 8,
                          .token_stride = 8,
                          .channel_stride = 1};
  REQUIRE(reinterpret_cast<const uint16_t*>(view.page<Half>(3, 1)) == &storage[56]);
  REQUIRE(element_size(ElementType::kFloat32) == sizeof(float));
  REQUIRE(element_size(ElementType::kFloat16) == sizeof(Half));
  REQUIRE(element_size(ElementType::kBFloat16) == sizeof(BFloat16));
}

TEST_CASE("Offsets pass 2^31 and 2^32 elements without wrapping") {
  constexpr size_t kBytes = size_t{9} << 31;  // of virtual memory; only its last bytes are touched
  void* memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* bytes = static_cast<uint8_t*>(memory);
  const PagePoolView view{.data = memory,
                          .type = ElementType::kBFloat16,
                          .num_pages = 1 << 22,
                          .page_stride = 2048,
                          .head_stride = 1024,
                          .token_stride = 64,
                          .channel_stride = 1};
  auto* far_page = view.page<BFloat16>((1 << 22) + 100, 1);
  REQUIRE(reinterpret_cast<uint8_t*>(far_page) - bytes == 2 * (int64_t{2048} * ((1 << 22) + 100) + 1024));
  far_page->bits = 0x1234;
  REQUIRE(view.page<BFloat16>((1 << 22) + 100, 1)->bits == 0x1234);

  const PageSummaryView summaries{.data = bytes, .page_stride = 4096, .head_stride = 64};
  REQUIRE(summaries.row((1 << 22) - 1, 3) - bytes == int64_t{4096} * ((1 << 22) - 1) + 192);
  ::munmap(memory, kBytes);
}
