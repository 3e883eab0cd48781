// The page allocator through its public methods: hand-made cases for each promise, then random walks against
// a model that reads every sequence's tokens through its page table, and threads for the ThreadSanitizer.
#include "runtime/page_allocator.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <array>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "paged_model.h"

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using tinyserve::runtime::PageAllocator;
using tinyserve::runtime::PageCopy;
using tinyserve::runtime::testing::PagedModel;

namespace {

using Ids = std::vector<int64_t>;
using Pages = std::vector<int32_t>;
using Copies = std::vector<PageCopy>;

std::optional<Copies> reserve(PageAllocator& allocator, const Ids& sequence_ids, const Ids& num_new) {
  return allocator.try_reserve(sequence_ids, num_new);
}

int64_t sequence_of(PageAllocator& allocator, int64_t length) {
  const int64_t id = allocator.new_sequence();
  REQUIRE(reserve(allocator, {id}, {length}) == Copies{});
  allocator.commit(id, length);
  return id;
}

Ids tokens_from(int64_t first, int64_t page_size = 16) {
  Ids tokens(page_size);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

}  // namespace

TEST_CASE("A new pool is all free and gives out pages in ascending order") {
  PageAllocator allocator(5, 16);
  REQUIRE(allocator.num_free() == 5);
  const int64_t id = sequence_of(allocator, 40);
  REQUIRE(allocator.page_ids(id) == Pages{0, 1, 2});
  REQUIRE(allocator.page_ids(id, 2) == Pages{2});
  REQUIRE(allocator.page_ids(id, 3).empty());
  REQUIRE(allocator.capacity(id) == 48);
  REQUIRE(allocator.num_used() == 3);
  allocator.free_sequence(id);
  REQUIRE(allocator.num_free() == 5);
  REQUIRE(allocator.num_sequences() == 0);
  REQUIRE(allocator.page_ids(sequence_of(allocator, 40)) == Pages{0, 1, 2});
  allocator.check();
}

TEST_CASE("A reservation covers all its sequences or changes nothing") {
  PageAllocator allocator(4, 16);
  const int64_t a = sequence_of(allocator, 16);
  const int64_t b = sequence_of(allocator, 10);
  const int64_t version = allocator.page_table_version(a);
  REQUIRE_FALSE(reserve(allocator, {a, b}, {17, 7 + 16}).has_value());
  REQUIRE(allocator.num_free() == 2);
  REQUIRE(allocator.num_pages_of(a) == 1);
  REQUIRE(allocator.page_table_version(a) == version);
  REQUIRE_THROWS_AS(allocator.commit(a, 1), std::invalid_argument);
  REQUIRE(reserve(allocator, {a, b}, {16, 6 + 16}) == Copies{});
  REQUIRE(allocator.num_free() == 0);
  allocator.check();
}

TEST_CASE("A wrong argument among right ones reserves nothing") {
  PageAllocator allocator(4, 16);
  const int64_t a = sequence_of(allocator, 3);
  const int64_t b = sequence_of(allocator, 3);
  REQUIRE_THROWS_AS(reserve(allocator, {a, 99}, {20, 1}), std::out_of_range);
  REQUIRE_THROWS_AS(reserve(allocator, {a, b}, {20, -1}), std::invalid_argument);
  REQUIRE_THROWS_AS(reserve(allocator, {a, b}, {20, std::numeric_limits<int64_t>::max()}),
                    std::invalid_argument);
  REQUIRE_THROWS_AS(reserve(allocator, {a, a}, {20, 1}), std::invalid_argument);
  REQUIRE_THROWS_AS(reserve(allocator, {a, b}, {20}), std::invalid_argument);
  REQUIRE(allocator.num_pages_of(a) == 1);
  REQUIRE(allocator.num_free() == 2);
  allocator.check();
}

TEST_CASE("A step that is repeated without commit takes no second set of pages") {
  PageAllocator allocator(4, 16);
  const int64_t id = sequence_of(allocator, 15);
  REQUIRE(reserve(allocator, {id}, {10}) == Copies{});
  const auto pages = allocator.page_ids(id);
  REQUIRE(reserve(allocator, {id}, {10}) == Copies{});
  REQUIRE(reserve(allocator, {id}, {1}) == Copies{});
  REQUIRE(allocator.page_ids(id) == pages);
  REQUIRE(allocator.length(id) == 15);
  allocator.commit(id, 10);
  REQUIRE_THROWS_AS(allocator.commit(id, 1), std::invalid_argument);
}

TEST_CASE("Trim gives back pages without committed tokens and keeps the open page writable") {
  PageAllocator allocator(4, 16);
  const int64_t id = sequence_of(allocator, 15);
  REQUIRE(reserve(allocator, {id}, {40}) == Copies{});
  const int64_t version = allocator.page_table_version(id);
  allocator.trim(id);
  REQUIRE(allocator.num_pages_of(id) == 1);
  REQUIRE(allocator.page_table_version(id) > version);
  allocator.commit(id, 1);
  REQUIRE_THROWS_AS(allocator.commit(id, 1), std::invalid_argument);
  REQUIRE(allocator.num_free() == 3);
  allocator.check();
}

TEST_CASE("Crop keeps just the pages that its tokens need") {
  const int64_t length = GENERATE(0, 15, 16, 17, 33, 48);
  PageAllocator allocator(4, 16);
  const int64_t id = sequence_of(allocator, 48);
  REQUIRE(reserve(allocator, {id}, {10}) == Copies{});
  allocator.crop(id, length);
  REQUIRE(allocator.length(id) == length);
  REQUIRE(allocator.num_pages_of(id) == (length + 15) / 16);
  REQUIRE(allocator.num_free() == 4 - (length + 15) / 16);
  REQUIRE_THROWS_AS(allocator.crop(id, length + 1), std::invalid_argument);
  REQUIRE_THROWS_AS(allocator.commit(id, 1), std::invalid_argument);
  allocator.check();
}

TEST_CASE("The first writer to a shared half-full page gets a copy and the last one keeps the page") {
  PageAllocator allocator(6, 16);
  const int64_t a = sequence_of(allocator, 20);
  const int64_t b = allocator.fork(a);
  const int64_t c = allocator.fork(b);
  REQUIRE(allocator.num_used() == 2);
  REQUIRE(allocator.ref_count(1) == 3);
  // All three in one batch, with pages for two copies only.
  REQUIRE(reserve(allocator, {b, a, c}, {1, 1, 1}) == Copies{{.src = 1, .dst = 2}, {.src = 1, .dst = 3}});
  REQUIRE(allocator.page_ids(c) == Pages{0, 1});
  REQUIRE(allocator.page_table_version(a) == 1);
  REQUIRE(allocator.page_table_version(c) == 0);
  REQUIRE(allocator.ref_count(0) == 3);
  allocator.check();
}

TEST_CASE("Forks at a page boundary share full pages without any copy") {
  PageAllocator allocator(4, 16);
  const int64_t a = sequence_of(allocator, 32);
  const int64_t b = allocator.fork(a);
  REQUIRE(reserve(allocator, {a, b}, {1, 1}) == Copies{});
  REQUIRE(allocator.page_ids(a) == Pages{0, 1, 2});
  REQUIRE(allocator.page_ids(b) == Pages{0, 1, 3});
}

TEST_CASE("Reserved pages that a fork shares are replaced without a copy") {
  PageAllocator allocator(5, 16);
  const int64_t a = sequence_of(allocator, 16);
  REQUIRE(reserve(allocator, {a}, {32}) == Copies{});
  const int64_t b = allocator.fork(a);
  REQUIRE(allocator.num_pages_of(b) == 3);
  REQUIRE_THROWS_AS(allocator.commit(a, 1), std::invalid_argument);
  REQUIRE(reserve(allocator, {a, b}, {32, 32}) == Copies{});
  REQUIRE(allocator.page_ids(a) == Pages{0, 3, 4});
  REQUIRE(allocator.page_ids(b) == Pages{0, 1, 2});
  allocator.check();
}

TEST_CASE("A registered page outlives its sequence and is found again by key and tokens") {
  PageAllocator allocator(4, 16);
  const int64_t a = sequence_of(allocator, 20);
  REQUIRE(allocator.register_page(a, 0, "key", tokens_from(0)));
  REQUIRE(allocator.register_page(a, 0, "key", tokens_from(0)));
  REQUIRE_FALSE(allocator.register_page(a, 0, "other key", tokens_from(0)));
  REQUIRE_FALSE(allocator.register_page(a, 0, "key", tokens_from(1)));
  allocator.free_sequence(a);
  REQUIRE(allocator.num_cached() == 1);

  const int64_t b = allocator.new_sequence();
  REQUIRE_FALSE(allocator.attach_cached(b, "key", tokens_from(1)));
  REQUIRE_FALSE(allocator.attach_cached(b, "unknown", tokens_from(0)));
  REQUIRE(allocator.attach_cached(b, "key", tokens_from(0)));
  REQUIRE(allocator.length(b) == 16);
  REQUIRE(allocator.page_table_version(b) == 0);
  REQUIRE(allocator.num_cached() == 0);
  const int64_t c = sequence_of(allocator, 16);
  REQUIRE_FALSE(allocator.register_page(c, 0, "key", tokens_from(0)));
  allocator.check();
}

TEST_CASE("Only sealed pages can be registered and only full sequences can attach") {
  PageAllocator allocator(4, 16);
  const int64_t id = sequence_of(allocator, 31);
  REQUIRE(reserve(allocator, {id}, {1}) == Copies{});
  REQUIRE_THROWS_AS(allocator.register_page(id, 1, "key", tokens_from(0)), std::invalid_argument);
  REQUIRE_THROWS_AS(allocator.register_page(id, 2, "key", tokens_from(0)), std::out_of_range);
  REQUIRE_THROWS_AS(allocator.register_page(id, -1, "key", tokens_from(0)), std::out_of_range);
  REQUIRE_THROWS_AS(allocator.register_page(id, 0, "key", tokens_from(0, 15)), std::invalid_argument);
  REQUIRE_THROWS_AS(allocator.attach_cached(id, "key", tokens_from(0)), std::invalid_argument);
  allocator.commit(id, 1);
  REQUIRE(reserve(allocator, {id}, {1}) == Copies{});
  REQUIRE_THROWS_AS(allocator.attach_cached(id, "key", tokens_from(0)), std::invalid_argument);
  allocator.trim(id);
  REQUIRE_FALSE(allocator.attach_cached(id, "key", tokens_from(0)));
}

TEST_CASE("Cached pages are evicted least recently used first, the end of a prefix before its start") {
  PageAllocator allocator(3, 16);
  const int64_t a = sequence_of(allocator, 48);
  for (int64_t i = 0; i < 3; ++i)
    REQUIRE(allocator.register_page(a, i, "a" + std::to_string(i), tokens_from(i)));
  allocator.free_sequence(a);
  const int64_t b = sequence_of(allocator, 1);
  REQUIRE(allocator.page_ids(b) == Pages{2});
  // A hit makes page 0 the most recently used one.
  const int64_t c = allocator.new_sequence();
  REQUIRE(allocator.attach_cached(c, "a0", tokens_from(0)));
  allocator.free_sequence(c);
  const int64_t d = sequence_of(allocator, 1);
  REQUIRE(allocator.page_ids(d) == Pages{1});
  REQUIRE(allocator.num_cached() == 1);
  REQUIRE_FALSE(allocator.attach_cached(allocator.new_sequence(), "a1", tokens_from(1)));
  allocator.check();
}

TEST_CASE("A registered page that crop reopens stays cached while free pages are to spare") {
  PageAllocator allocator(2, 16);
  const int64_t a = sequence_of(allocator, 16);
  REQUIRE(allocator.register_page(a, 0, "key", tokens_from(0)));
  allocator.crop(a, 5);
  REQUIRE(reserve(allocator, {a}, {11}) == Copies{{.src = 0, .dst = 1}});
  REQUIRE(allocator.num_cached() == 1);
  REQUIRE(allocator.attach_cached(allocator.new_sequence(), "key", tokens_from(0)));
  allocator.check();
}

TEST_CASE("A registered page that crop reopens is written in place when no page is free") {
  PageAllocator allocator(1, 16);
  const int64_t a = sequence_of(allocator, 16);
  REQUIRE(allocator.register_page(a, 0, "key", tokens_from(0)));
  allocator.crop(a, 5);
  REQUIRE(reserve(allocator, {a}, {11}) == Copies{});
  allocator.commit(a, 11);
  REQUIRE_FALSE(allocator.attach_cached(allocator.new_sequence(), "key", tokens_from(0)));
  REQUIRE(allocator.register_page(a, 0, "new key", tokens_from(7)));
  allocator.check();
}

TEST_CASE("A pinned page is neither freed nor evicted nor given out until its last unpin") {
  PageAllocator allocator(2, 16);
  const bool is_registered = GENERATE(false, true);
  const int64_t a = sequence_of(allocator, 16);
  if (is_registered) REQUIRE(allocator.register_page(a, 0, "key", tokens_from(0)));
  allocator.pin(0);
  allocator.pin(0);
  allocator.free_sequence(a);
  REQUIRE(allocator.num_used() == 1);
  REQUIRE(allocator.pin_count(0) == 2);
  const int64_t b = allocator.new_sequence();
  REQUIRE_FALSE(reserve(allocator, {b}, {17}).has_value());
  allocator.unpin(0);
  REQUIRE_FALSE(reserve(allocator, {b}, {17}).has_value());
  if (is_registered) REQUIRE(allocator.attach_cached(allocator.fork(b), "key", tokens_from(0)) == true);
  allocator.unpin(0);
  REQUIRE_THROWS_AS(allocator.unpin(0), std::invalid_argument);
  REQUIRE(reserve(allocator, {b}, {17}).has_value() == !is_registered);
  allocator.check();
}

TEST_CASE("Pins are refused where there is nothing to keep") {
  PageAllocator allocator(2, 16);
  REQUIRE_THROWS_AS(allocator.pin(0), std::invalid_argument);
  REQUIRE_THROWS_AS(allocator.pin(2), std::out_of_range);
  REQUIRE_THROWS_AS(allocator.pin(-1), std::out_of_range);
  REQUIRE_THROWS_AS(allocator.pin(int64_t{1} << 32), std::out_of_range);
}

TEST_CASE("A grown pool keeps its pages and satisfies what did not fit before") {
  PageAllocator allocator(1, 16);
  const int64_t id = sequence_of(allocator, 16);
  REQUIRE_FALSE(reserve(allocator, {id}, {32}).has_value());
  allocator.grow(3);
  REQUIRE(reserve(allocator, {id}, {32}) == Copies{});
  REQUIRE(allocator.page_ids(id) == Pages{0, 1, 2});
  REQUIRE_THROWS_AS(allocator.grow(2), std::invalid_argument);
  REQUIRE_THROWS_AS(allocator.grow(int64_t{1} << 31), std::invalid_argument);
  allocator.grow(3);
  allocator.check();
}

TEST_CASE("Errors say what was expected and what came") {
  PageAllocator allocator(2, 16);
  const int64_t id = allocator.new_sequence();
  allocator.free_sequence(id);
  REQUIRE_THROWS_MATCHES(
      allocator.length(id), std::out_of_range,
      MessageMatches(ContainsSubstring("expected a live sequence, got 0, which was freed")));
  REQUIRE_THROWS_MATCHES(PageAllocator(-1, 16), std::invalid_argument,
                         MessageMatches(ContainsSubstring("num_pages")));
  REQUIRE_THROWS_MATCHES(PageAllocator(1, 0), std::invalid_argument,
                         MessageMatches(ContainsSubstring("page_size")));
  REQUIRE(allocator.new_sequence() == id + 1);
}

TEST_CASE("Every sequence reads back its own tokens after any order of calls") {
  const uint32_t seed = GENERATE(range(0u, 24u));
  const int64_t page_size = std::array<int64_t, 3>{1, 3, 16}[seed % 3];
  CAPTURE(seed, page_size);
  PagedModel model(12, page_size, seed);
  for (int64_t call = 0; call < 400; ++call) {
    const int64_t choice = model.draw(0, 99);
    CAPTURE(call, choice);
    if (!model.has_sequences() || choice < 8) {
      model.start();
    } else if (choice < 48) {
      const int64_t other = model.any_sequence();
      const int64_t id = model.any_sequence();
      const int64_t num_new = model.draw(0, 2 * page_size + 1);
      const int64_t num_written = model.draw(0, num_new);
      Ids ids{id}, counts{num_new}, written{num_written};
      if (other != id) ids.push_back(other), counts.push_back(1), written.push_back(1);
      model.step(ids, counts, written);
    } else if (choice < 58) {
      model.fork(model.any_sequence());
    } else if (choice < 68) {
      const int64_t id = model.any_sequence();
      const int64_t boundary = std::array<int64_t, 5>{0, 15, 16, 17, 33}[model.draw(0, 4)];
      model.crop(id,
                 model.draw(0, 1) ? std::min(boundary, model.length(id)) : model.draw(0, model.length(id)));
    } else if (choice < 76) {
      model.end(model.any_sequence());
    } else if (choice < 86) {
      const int64_t id = model.any_sequence();
      for (int64_t i = 0; i < model.length(id) / page_size; ++i)
        model.register_page(id, i, model.draw(0, 9) == 0);
    } else if (choice < 92) {
      model.attach_any(model.any_sequence());
    } else if (choice < 94) {
      model.pin_any();
    } else if (choice < 97) {
      model.unpin_any();
    } else if (choice < 99) {
      model.allocator.trim(model.any_sequence());
    } else if (model.num_pages() < 20) {
      model.grow(model.num_pages() + 1);
    }
    model.verify();
  }
}

TEST_CASE("Threads that step, fork and share prefixes at once leave every invariant whole") {
  PageAllocator allocator(40, 16);
  const int64_t shared = sequence_of(allocator, 24);
  const auto work = [&allocator, shared](uint32_t seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < 200; ++round) {
      const int64_t id = round % 2 == 0 ? allocator.new_sequence() : allocator.fork(shared);
      if (round % 2 == 0) allocator.attach_cached(id, "prefix", tokens_from(0));
      const auto num_new = static_cast<int64_t>(random() % 40);
      if (reserve(allocator, {id}, {num_new})) allocator.commit(id, num_new);
      if (allocator.length(id) >= 16) allocator.register_page(id, 0, "prefix", tokens_from(0));
      if (allocator.num_pages_of(id) > 0) {
        const int32_t page_id = allocator.page_ids(id).back();
        allocator.pin(page_id);
        allocator.crop(id, allocator.length(id) / 2);
        allocator.unpin(page_id);
      }
      if (round % 50 == 0) allocator.check();
      allocator.free_sequence(id);
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  allocator.check();
  REQUIRE(allocator.num_sequences() == 1);
  REQUIRE(allocator.num_used() == 2);
}
