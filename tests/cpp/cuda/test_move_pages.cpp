// The CUDA moves of pages, on the emulator: every byte of the pages lands where it belongs, in any layout and
// alignment, and no other byte changes.
#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/params.h"
#include "cuda/move_pages.h"
#include "cuda_emulator/testing.h"

using tinyserve::core::MovePagesParams;
using tinyserve::core::PagePart;

namespace {

constexpr int64_t kNumPages = 6;
constexpr int64_t kNumHeads = 3;

struct Layout {
  bool columns_first;  // neighbours in memory are those of a row
  int64_t shift;       // bytes before the first element
  int64_t gap;         // bytes behind each block
};

// A pool of rows x columns, and its bytes.
struct Pool {
  std::vector<char> bytes;
  PagePart part;

  Pool(int64_t rows, int64_t columns, int64_t element, Layout layout, uint8_t first) {
    const int64_t block = rows * columns * element + layout.gap;
    bytes.resize(static_cast<size_t>(layout.shift + kNumPages * kNumHeads * block));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(first + i * 7);
    part = {.data = bytes.data() + layout.shift,
            .num_heads = kNumHeads,
            .page_stride = kNumHeads * block,
            .head_stride = block,
            .rows = rows,
            .row_stride = layout.columns_first ? columns * element : element,
            .columns = columns,
            .column_stride = layout.columns_first ? element : rows * element,
            .element_size = element};
  }
  char* element(int64_t page, int64_t head, int64_t row, int64_t column) {
    return part.data + page * part.page_stride + head * part.head_stride + row * part.row_stride +
           column * part.column_stride;
  }
};

}  // namespace

TEST_CASE("CUDA moves every element of the named pages and nothing else") {
  const std::vector<int32_t> from_ids = {4, 0, 3};
  const std::vector<int32_t> to_ids = {1, 5, 2};
  for (const int64_t element : {1, 2, 4}) {
    for (const Layout from : {Layout{true, 0, 0}, Layout{false, 0, 16}, Layout{true, 4 * element, element}}) {
      for (const Layout to : {Layout{true, 0, 0}, Layout{false, 16, 0}, Layout{false, element, 8}}) {
        for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{16, 8}, {7, 24}, {1, 48}, {5, 1}}) {
          CAPTURE(element, from.columns_first, from.shift, to.columns_first, to.shift, rows, columns);
          Pool source(rows, columns, element, from, 1);
          Pool expected(rows, columns, element, to, 100);
          for (size_t i = 0; i < from_ids.size(); ++i) {
            for (int64_t head = 0; head < kNumHeads; ++head) {
              for (int64_t row = 0; row < rows; ++row) {
                for (int64_t column = 0; column < columns; ++column) {
                  std::memcpy(expected.element(to_ids[i], head, row, column),
                              source.element(from_ids[i], head, row, column), static_cast<size_t>(element));
                }
              }
            }
          }
          const auto moved = tinyserve::cuda::emulator::same_under_every_schedule([&] {
            Pool target(rows, columns, element, to, 100);
            const MovePagesParams params{.from = source.part,
                                         .from_ids = from_ids.data(),
                                         .to = target.part,
                                         .to_ids = to_ids.data(),
                                         .num_pages = static_cast<int64_t>(from_ids.size())};
            REQUIRE(tinyserve::cuda::move_pages(params, nullptr) == cudaSuccess);
            return target.bytes;
          });
          REQUIRE(moved == expected.bytes);
        }
      }
    }
  }
}

TEST_CASE("Without ids the CUDA moves take page after page") {
  Pool source(4, 8, 2, {true, 0, 0}, 1);
  Pool target(4, 8, 2, {true, 0, 0}, 100);
  const MovePagesParams params{
      .from = source.part, .from_ids = nullptr, .to = target.part, .to_ids = nullptr, .num_pages = kNumPages};
  REQUIRE(tinyserve::cuda::move_pages(params, nullptr) == cudaSuccess);
  REQUIRE(target.bytes == source.bytes);
}
