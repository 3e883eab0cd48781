// The parts under the page allocator by themselves: what their checks find, which the allocator never lets
// happen.
#include "runtime/page_pool.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <stdexcept>
#include <vector>

#include "runtime/prefix_index.h"

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using tinyserve::runtime::kNoPage;
using tinyserve::runtime::PagePool;
using tinyserve::runtime::PageState;
using tinyserve::runtime::PrefixIndex;

namespace {

using Refs = std::vector<int32_t>;
using Flags = std::vector<uint8_t>;

}  // namespace

TEST_CASE("The holders and the registration of a page decide its state") {
  PagePool pool(2);
  const int32_t page_id = pool.take_free();
  REQUIRE(pool.state(page_id) == PageState::kHeld);
  pool.add_pin(page_id);
  pool.drop_ref(page_id, true);
  REQUIRE(pool.state(page_id) == PageState::kHeld);
  pool.drop_pin(page_id, true);
  REQUIRE(pool.state(page_id) == PageState::kCached);
  REQUIRE(pool.oldest_cached() == page_id);
  pool.release_cached(page_id);
  REQUIRE(pool.state(page_id) == PageState::kFree);
  REQUIRE(pool.oldest_cached() == kNoPage);
  pool.check(Refs{0, 0}, Flags{0, 0});
}

TEST_CASE("The pool's check names the page and what is wrong with it") {
  PagePool pool(3);
  const int32_t held = pool.take_free();
  const int32_t cached = pool.take_free();
  pool.drop_ref(cached, true);
  REQUIRE(held == 0);
  REQUIRE(cached == 1);
  REQUIRE_NOTHROW(pool.check(Refs{1, 0, 0}, Flags{0, 1, 0}));
  const auto fails_with = [](const char* text) { return MessageMatches(ContainsSubstring(text)); };
  REQUIRE_THROWS_MATCHES(pool.check(Refs{2, 0, 0}, Flags{0, 1, 0}), std::runtime_error,
                         fails_with("page 0: reference count is 1, but page tables name it 2 times"));
  REQUIRE_THROWS_MATCHES(pool.check(Refs{1, 0, 1}, Flags{0, 1, 0}), std::runtime_error, fails_with("page 2"));
  REQUIRE_THROWS_MATCHES(
      pool.check(Refs{1, 0, 0}, Flags{0, 0, 0}), std::runtime_error,
      fails_with("page 1: its holders and registration make it free, but its state is cached"));
  REQUIRE_THROWS_MATCHES(pool.check(Refs{1, 0, 0}, Flags{0, 1, 1}), std::runtime_error,
                         fails_with("make it cached, but its state is free"));
  REQUIRE_THROWS_MATCHES(pool.check(Refs{1, 0}, Flags{0, 1, 0}), std::runtime_error,
                         fails_with("expected 3 pages"));
}

TEST_CASE("A key leads to its page only together with its tokens") {
  PrefixIndex index(2);
  const std::vector<int64_t> tokens{1, 2};
  const std::vector<int64_t> others{1, 3};
  REQUIRE(index.insert(0, "key", tokens));
  REQUIRE_FALSE(index.insert(1, "key", others));
  REQUIRE(index.find("key", tokens) == 0);
  REQUIRE(index.find("key", others) == kNoPage);
  REQUIRE(index.check(2) == Flags{1, 0});
  REQUIRE_THROWS_MATCHES(index.check(3), std::runtime_error,
                         MessageMatches(ContainsSubstring("page 0: registered tokens do not fill a page")));
  index.erase(0);
  index.erase(0);
  REQUIRE(index.find("key", tokens) == kNoPage);
  REQUIRE(index.insert(1, "key", others));
  REQUIRE(index.check(2) == Flags{0, 1});
}
