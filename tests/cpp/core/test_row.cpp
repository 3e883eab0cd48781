// What a row sees, against the definition applied to one position after the other.
#include "core/row.h"

#include <catch2/catch_test_macros.hpp>

#include <cstdint>
#include <set>

using tinyserve::core::make_row;
using tinyserve::core::Row;

TEST_CASE("A row sees the positions up to its own that lie in the window, and their pages") {
  for (const int64_t page_size : {1, 7, 16, 64}) {
    for (const int64_t window : {-1, 0, 1, 6, 7, 8, 64, 1000}) {
      for (int64_t position = 0; position < 200; ++position) {
        int64_t first_token = -1;
        int64_t end_token = 0;
        std::set<int64_t> pages;
        for (int64_t token = 0; token <= position; ++token) {
          if (window > 0 && token <= position - window) continue;
          if (first_token < 0) first_token = token;
          end_token = token + 1;
          pages.insert(token / page_size);
        }
        const Row row = make_row(nullptr, 3, position, window);
        const bool right = row.sequence == 3 && row.first_token == first_token &&
                           row.num_tokens == end_token && row.first_page(page_size) == *pages.begin() &&
                           row.end_page(page_size) == *pages.rbegin() + 1 &&
                           row.num_visible_pages(page_size) == static_cast<int64_t>(pages.size());
        if (!right) FAIL("page_size " << page_size << ", window " << window << ", position " << position);
      }
    }
  }
}

TEST_CASE("A row in a padding slot sees nothing") {
  for (const int64_t position : {-1, -2, -1000}) {
    for (const int64_t window : {-1, 1, 64}) {
      const Row row = make_row(nullptr, 0, position, window);
      REQUIRE(row.num_tokens == 0);
      REQUIRE(row.end_page(16) == 0);
      REQUIRE(row.num_visible_pages(16) == 0);
    }
  }
}

TEST_CASE("Positions beyond 2^31 do not wrap") {
  const int64_t position = (int64_t{1} << 33) + 5;
  const Row row = make_row(nullptr, 0, position, 16);
  REQUIRE(row.num_tokens == position + 1);
  REQUIRE(row.first_token == position - 15);
  REQUIRE(row.num_visible_pages(16) == 2);
}
