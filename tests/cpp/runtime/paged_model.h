// A paged cache in miniature, to test the allocator through what it is for: every page slot holds one number,
// every sequence also keeps its tokens in a plain vector, and after each call what the page tables lead to
// must be exactly that vector. The model holds page tables as it last saw them and derives every expected
// count from them.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/page_allocator.h"

namespace tinyserve::runtime::testing {

class PagedModel {
 public:
  PagedModel(int64_t num_pages, int64_t page_size, uint32_t seed)
      : allocator(num_pages, page_size),
        page_size_(page_size),
        random_(seed),
        slots_(num_pages * page_size, -1) {}

  PageAllocator allocator;

  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool has_sequences() const { return !sequences_.empty(); }
  size_t num_sequences() const { return sequences_.size(); }
  int64_t any_sequence() { return std::next(sequences_.begin(), draw(0, num_sequences() - 1))->first; }
  int64_t length(int64_t id) const { return static_cast<int64_t>(sequences_.at(id).tokens.size()); }
  int64_t num_pages() const { return static_cast<int64_t>(slots_.size()) / page_size_; }

  void grow(int64_t total) {
    allocator.grow(total);
    slots_.resize(total * page_size_, -1);
  }

  int64_t start() {
    const int64_t id = allocator.new_sequence();
    REQUIRE(sequences_.try_emplace(id).second);
    return id;
  }

  int64_t fork(int64_t id) {
    const int64_t child = allocator.fork(id);
    REQUIRE(sequences_.try_emplace(child, sequences_.at(id)).second);
    sequences_.at(child).version = allocator.page_table_version(child);
    REQUIRE(allocator.page_ids(child) == allocator.page_ids(id));
    return child;
  }

  void end(int64_t id) {
    allocator.free_sequence(id);
    sequences_.erase(id);
  }

  void crop(int64_t id, int64_t length) {
    allocator.crop(id, length);
    sequences_.at(id).tokens.resize(length);
    REQUIRE(allocator.num_pages_of(id) == (length + page_size_ - 1) / page_size_);
  }

  // Reserves, performs the copies, and writes and commits `num_written[i]` of the reserved tokens.
  bool step(std::span<const int64_t> ids, std::span<const int64_t> num_new,
            std::span<const int64_t> num_written) {
    const std::vector<int32_t> before = counts();
    const int64_t num_available = allocator.num_free() + allocator.num_cached();
    const int64_t num_required = pages_required(ids, num_new);
    const std::set<int32_t> held_before = held_pages();
    const auto copies = allocator.try_reserve(ids, num_new);
    REQUIRE(copies.has_value() == (num_required <= num_available));
    if (!copies) {
      REQUIRE(counts() == before);
      verify();
      return false;
    }
    // In this order and backwards the copies must be the same, or they would depend on one another.
    std::set<int32_t> sources;
    std::set<int32_t> destinations;
    for (const PageCopy& copy : *copies) {
      sources.insert(copy.src);
      REQUIRE(destinations.insert(copy.dst).second);
      REQUIRE_FALSE(held_before.contains(copy.dst));
      std::copy_n(slots_.begin() + copy.src * page_size_, page_size_, slots_.begin() + copy.dst * page_size_);
    }
    for (const int32_t source : sources) REQUIRE_FALSE(destinations.contains(source));
    require_new_pages_were_not_held(ids, held_before);
    for (size_t i = 0; i < ids.size(); ++i) write(ids[i], num_new[i], num_written[i]);
    verify();
    return true;
  }

  bool append(int64_t id, int64_t num_new) {
    return step(std::vector{id}, std::vector{num_new}, std::vector{num_new});
  }

  // The key of a page: all tokens up to its end. Optionally one that collides with the keys of other
  // contents.
  std::string key_of(int64_t id, int64_t page_idx, bool collides) const {
    if (collides) return "collision";
    const auto& tokens = sequences_.at(id).tokens;
    const auto* bytes = reinterpret_cast<const char*>(tokens.data());
    return {bytes, bytes + (page_idx + 1) * page_size_ * sizeof(int64_t)};
  }
  std::vector<int64_t> page_tokens(int64_t id, int64_t page_idx) const {
    const auto first = sequences_.at(id).tokens.begin() + page_idx * page_size_;
    return {first, first + page_size_};
  }

  void register_page(int64_t id, int64_t page_idx, bool collides) {
    const auto tokens = page_tokens(id, page_idx);
    const std::string key = key_of(id, page_idx, collides);
    if (allocator.register_page(id, page_idx, key, tokens)) contents_[key] = tokens;
  }

  // Tries a content that was registered at some time; whether it hits is up to the cache, what it brings is
  // not.
  bool attach_any(int64_t id) {
    if (contents_.empty() || length(id) != allocator.capacity(id)) return false;
    const auto& [key, tokens] = *std::next(contents_.begin(), draw(0, contents_.size() - 1));
    if (!allocator.attach_cached(id, key, tokens)) return false;
    auto& mine = sequences_.at(id).tokens;
    mine.insert(mine.end(), tokens.begin(), tokens.end());
    return true;
  }

  void pin_any() {
    const auto held = held_pages();
    if (held.empty()) return;
    const int32_t page_id = *std::next(held.begin(), draw(0, held.size() - 1));
    allocator.pin(page_id);
    pins_.push_back(page_id);
  }

  void unpin_any() {
    if (pins_.empty()) return;
    const auto pin = pins_.begin() + draw(0, pins_.size() - 1);
    allocator.unpin(*pin);
    pins_.erase(pin);
  }

  // What every call must leave behind.
  void verify() {
    allocator.check();
    const auto held = held_pages();
    REQUIRE(allocator.num_used() == static_cast<int32_t>(held.size()));
    REQUIRE(allocator.num_free() + allocator.num_cached() + allocator.num_used() == allocator.num_pages());
    std::map<int32_t, int32_t> refs;
    for (auto& [id, sequence] : sequences_) {
      const auto pages = allocator.page_ids(id);
      for (const int32_t page_id : pages) ++refs[page_id];
      REQUIRE(allocator.length(id) == length(id));
      std::vector<int64_t> read(length(id));
      for (int64_t i = 0; i < length(id); ++i)
        read[i] = slots_[pages[i / page_size_] * page_size_ + i % page_size_];
      REQUIRE(read == sequence.tokens);
      const bool only_appended =
          pages.size() >= sequence.seen_pages.size() &&
          std::equal(sequence.seen_pages.begin(), sequence.seen_pages.end(), pages.begin());
      const int64_t version = allocator.page_table_version(id);
      REQUIRE((version > sequence.version) == !only_appended);
      sequence.seen_pages = pages;
      sequence.version = version;
    }
    for (const auto& [page_id, count] : refs) REQUIRE(allocator.ref_count(page_id) == count);
  }

 private:
  struct ModelSequence {
    std::vector<int64_t> tokens;
    std::vector<int32_t> seen_pages;  // the page table and its version at the last verify()
    int64_t version = 0;
  };

  std::vector<int32_t> counts() const {
    return {allocator.num_free(), allocator.num_cached(), allocator.num_used()};
  }

  std::set<int32_t> held_pages() const {
    std::set<int32_t> held(pins_.begin(), pins_.end());
    for (const auto& [id, sequence] : sequences_) {
      const auto pages = allocator.page_ids(id);
      held.insert(pages.begin(), pages.end());
    }
    return held;
  }

  // Appended pages, and a new page for each existing one that is written while somebody else still has it.
  int64_t pages_required(std::span<const int64_t> ids, std::span<const int64_t> num_new) const {
    std::map<int32_t, int32_t> refs;
    for (const auto& [id, sequence] : sequences_) {
      for (const int32_t page_id : allocator.page_ids(id)) ++refs[page_id];
    }
    int64_t num_required = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto pages = allocator.page_ids(ids[i]);
      if (num_new[i] == 0) continue;
      for (int64_t page_idx = length(ids[i]) / page_size_;
           page_idx * page_size_ < length(ids[i]) + num_new[i]; ++page_idx) {
        if (page_idx >= static_cast<int64_t>(pages.size())) {
          ++num_required;
        } else if (refs[pages[page_idx]] > 1) {
          ++num_required;
          --refs[pages[page_idx]];
        }
      }
    }
    return num_required;
  }

  void require_new_pages_were_not_held(std::span<const int64_t> ids,
                                       const std::set<int32_t>& held_before) const {
    for (const int64_t id : ids) {
      const auto& seen = sequences_.at(id).seen_pages;
      for (const int32_t page_id : allocator.page_ids(id)) {
        if (std::ranges::find(seen, page_id) == seen.end()) REQUIRE_FALSE(held_before.contains(page_id));
      }
    }
  }

  // Fills every reserved slot, as a step does whose last tokens are then rejected; commits the first
  // `num_written`.
  void write(int64_t id, int64_t num_reserved, int64_t num_written) {
    const auto pages = allocator.page_ids(id);
    auto& tokens = sequences_.at(id).tokens;
    for (int64_t i = 0; i < num_reserved; ++i) {
      const int64_t position = allocator.length(id) + i;
      const int64_t token = draw(0, 2);  // few values, so that equal contents come up
      slots_[pages[position / page_size_] * page_size_ + position % page_size_] = token;
      if (i < num_written) tokens.push_back(token);
    }
    allocator.commit(id, num_written);
  }

  int64_t page_size_;
  std::mt19937 random_;
  std::vector<int64_t> slots_;  // [num_pages * page_size]
  std::map<int64_t, ModelSequence> sequences_;
  std::map<std::string, std::vector<int64_t>> contents_;  // key -> tokens, for all that was ever registered
  std::vector<int32_t> pins_;
};

}  // namespace tinyserve::runtime::testing
