// Sequences on top of the page pool and the prefix index: argument checks, locking, and the order of steps
// that makes every call happen in whole or not at all (whatever may throw comes before the first change).
#include "runtime/page_allocator.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tinyserve::runtime {
namespace {

// Lengths and page ids are int32 in the tensors that the kernels read.
constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

std::string expected_got(const char* name, const std::string& expected, int64_t got) {
  return std::string(name) + ": expected " + expected + ", got " + std::to_string(got);
}

int32_t checked_num_pages(int64_t num_pages) {
  if (num_pages < 0 || num_pages > kMaxLength) {
    throw std::invalid_argument(expected_got("num_pages", "a value in [0, 2**31)", num_pages));
  }
  return static_cast<int32_t>(num_pages);
}

int64_t checked_page_size(int64_t page_size) {
  if (page_size < 1 || page_size > kMaxLength) {
    throw std::invalid_argument(expected_got("page_size", "a value in [1, 2**31)", page_size));
  }
  return page_size;
}

void check_num_tokens(std::span<const int64_t> tokens, int64_t page_size) {
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens != page_size) {
    throw std::invalid_argument(
        expected_got("tokens", "page_size = " + std::to_string(page_size) + " tokens", num_tokens));
  }
}

}  // namespace

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size)
    : page_size_(checked_page_size(page_size)),
      pool_(checked_num_pages(num_pages)),
      index_(pool_.num_pages()) {}

int32_t PageAllocator::num_pages() const {
  const std::lock_guard lock(mutex_);
  return pool_.num_pages();
}

int32_t PageAllocator::num_free() const {
  const std::lock_guard lock(mutex_);
  return pool_.num_free();
}

int32_t PageAllocator::num_cached() const {
  const std::lock_guard lock(mutex_);
  return pool_.num_cached();
}

int32_t PageAllocator::num_used() const {
  const std::lock_guard lock(mutex_);
  return pool_.num_held();
}

int64_t PageAllocator::num_sequences() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(sequences_.size());
}

void PageAllocator::grow(int64_t num_pages) {
  const int32_t total = checked_num_pages(num_pages);
  const std::lock_guard lock(mutex_);
  if (total < pool_.num_pages()) {
    throw std::invalid_argument(
        expected_got("num_pages", "a new total of at least " + std::to_string(pool_.num_pages()), num_pages));
  }
  index_.reserve(total);
  pool_.grow(total);
  index_.grow(total);
}

int64_t PageAllocator::new_sequence() {
  const std::lock_guard lock(mutex_);
  sequences_.try_emplace(next_sequence_id_);
  return next_sequence_id_++;
}

int64_t PageAllocator::fork(int64_t sequence_id) {
  const std::lock_guard lock(mutex_);
  Sequence& parent = find(sequence_id);
  Sequence child{.pages = parent.pages, .length = parent.length, .reserved_len = parent.length};
  sequences_.try_emplace(next_sequence_id_, std::move(child));
  for (const int32_t page_id : parent.pages) pool_.add_ref(page_id);
  parent.reserved_len = parent.length;
  return next_sequence_id_++;
}

void PageAllocator::free_sequence(int64_t sequence_id) {
  const std::lock_guard lock(mutex_);
  drop_pages(find(sequence_id), 0);
  sequences_.erase(sequence_id);
}

int64_t PageAllocator::length(int64_t sequence_id) const {
  const std::lock_guard lock(mutex_);
  return find(sequence_id).length;
}

int64_t PageAllocator::capacity(int64_t sequence_id) const {
  const std::lock_guard lock(mutex_);
  return find(sequence_id).capacity(page_size_);
}

int64_t PageAllocator::num_pages_of(int64_t sequence_id) const {
  const std::lock_guard lock(mutex_);
  return find(sequence_id).num_pages();
}

std::vector<int32_t> PageAllocator::page_ids(int64_t sequence_id, int64_t start) const {
  const std::lock_guard lock(mutex_);
  const Sequence& sequence = find(sequence_id);
  if (start < 0 || start > sequence.num_pages()) {
    throw std::out_of_range(
        expected_got("start", "a value in [0, " + std::to_string(sequence.num_pages()) + "]", start));
  }
  return {sequence.pages.begin() + start, sequence.pages.end()};
}

int64_t PageAllocator::page_table_version(int64_t sequence_id) const {
  const std::lock_guard lock(mutex_);
  return find(sequence_id).table_version;
}

std::optional<std::vector<PageCopy>> PageAllocator::try_reserve(std::span<const int64_t> sequence_ids,
                                                                std::span<const int64_t> num_new) {
  if (sequence_ids.size() != num_new.size()) {
    throw std::invalid_argument(expected_got("num_new",
                                             std::to_string(sequence_ids.size()) + " values, one a sequence",
                                             static_cast<int64_t>(num_new.size())));
  }
  std::vector<int64_t> sorted_ids(sequence_ids.begin(), sequence_ids.end());
  std::ranges::sort(sorted_ids);
  if (const auto twice = std::ranges::adjacent_find(sorted_ids); twice != sorted_ids.end()) {
    throw std::invalid_argument("sequence_ids: expected each sequence once, got sequence " +
                                std::to_string(*twice) + " twice");
  }
  const std::lock_guard lock(mutex_);
  Reservation reservation(pool_, index_, page_size_);
  for (size_t i = 0; i < sequence_ids.size(); ++i) {
    Sequence& sequence = find(sequence_ids[i]);
    const int64_t max_new = kMaxLength - sequence.length;
    if (num_new[i] < 0 || num_new[i] > max_new) {
      throw std::invalid_argument(expected_got(
          "num_new",
          "values in [0, " + std::to_string(max_new) + "] for sequence " + std::to_string(sequence_ids[i]),
          num_new[i]));
    }
    reservation.add(sequence, num_new[i]);
  }
  if (reservation.num_required() > int64_t{pool_.num_free()} + pool_.num_cached()) return std::nullopt;
  return reservation.apply(pool_, index_);
}

void PageAllocator::commit(int64_t sequence_id, int64_t num_new) {
  const std::lock_guard lock(mutex_);
  Sequence& sequence = find(sequence_id);
  const int64_t max_new = sequence.reserved_len - sequence.length;
  if (num_new < 0 || num_new > max_new) {
    throw std::invalid_argument(expected_got("num_new",
                                             "a value in [0, " + std::to_string(max_new) +
                                                 "], what sequence " + std::to_string(sequence_id) +
                                                 " has reserved",
                                             num_new));
  }
  sequence.length += num_new;
}

void PageAllocator::crop(int64_t sequence_id, int64_t length) {
  const std::lock_guard lock(mutex_);
  Sequence& sequence = find(sequence_id);
  if (length < 0 || length > sequence.length) {
    throw std::invalid_argument(
        expected_got("length", "a value in [0, " + std::to_string(sequence.length) + "]", length));
  }
  drop_pages(sequence, num_pages_for(length, page_size_));
  sequence.length = sequence.reserved_len = length;
}

void PageAllocator::trim(int64_t sequence_id) {
  const std::lock_guard lock(mutex_);
  Sequence& sequence = find(sequence_id);
  drop_pages(sequence, num_pages_for(sequence.length, page_size_));
  sequence.reserved_len = std::min(sequence.reserved_len, sequence.capacity(page_size_));
}

void PageAllocator::pin(int64_t page_id) {
  const std::lock_guard lock(mutex_);
  const int32_t page = checked_page(page_id);
  if (pool_.state(page) == PageState::kFree) {
    throw std::invalid_argument(expected_got("page_id", "a used or cached page", page_id) +
                                ", which is free");
  }
  pool_.add_pin(page);
}

void PageAllocator::unpin(int64_t page_id) {
  const std::lock_guard lock(mutex_);
  const int32_t page = checked_page(page_id);
  if (pool_.pin_count(page) == 0) {
    throw std::invalid_argument(expected_got("page_id", "a pinned page", page_id) + ", which is not pinned");
  }
  pool_.drop_pin(page, index_.contains_page(page));
}

bool PageAllocator::register_page(int64_t sequence_id, int64_t page_idx, std::string key,
                                  std::span<const int64_t> tokens) {
  const std::lock_guard lock(mutex_);
  const Sequence& sequence = find(sequence_id);
  if (page_idx < 0 || page_idx >= sequence.num_pages()) {
    throw std::out_of_range(
        expected_got("page_idx", "a value in [0, " + std::to_string(sequence.num_pages()) + ")", page_idx));
  }
  const int64_t num_sealed = sequence.length / page_size_;
  if (page_idx >= num_sealed) {
    throw std::invalid_argument(expected_got(
        "page_idx", "one of the " + std::to_string(num_sealed) + " pages full of committed tokens",
        page_idx));
  }
  check_num_tokens(tokens, page_size_);
  return index_.insert(sequence.pages[page_idx], std::move(key), tokens);
}

bool PageAllocator::attach_cached(int64_t sequence_id, const std::string& key,
                                  std::span<const int64_t> tokens) {
  const std::lock_guard lock(mutex_);
  Sequence& sequence = find(sequence_id);
  check_num_tokens(tokens, page_size_);
  if (sequence.length != sequence.capacity(page_size_)) {
    throw std::invalid_argument("sequence_id: expected a sequence whose length is its capacity, got length " +
                                std::to_string(sequence.length) + " and capacity " +
                                std::to_string(sequence.capacity(page_size_)));
  }
  if (sequence.length + page_size_ > kMaxLength) {
    throw std::invalid_argument(
        expected_got("sequence_id", "a length that stays below 2**31", sequence.length + page_size_));
  }
  const int32_t page_id = index_.find(key, tokens);
  if (page_id == kNoPage) return false;
  sequence.pages.push_back(page_id);
  pool_.add_ref(page_id);
  sequence.length = sequence.reserved_len = sequence.length + page_size_;
  return true;
}

int32_t PageAllocator::ref_count(int64_t page_id) const {
  const std::lock_guard lock(mutex_);
  return pool_.ref_count(checked_page(page_id));
}

int32_t PageAllocator::pin_count(int64_t page_id) const {
  const std::lock_guard lock(mutex_);
  return pool_.pin_count(checked_page(page_id));
}

void PageAllocator::check() const {
  const std::lock_guard lock(mutex_);
  const std::vector<uint8_t> is_registered = index_.check(page_size_);
  std::vector<int32_t> table_refs(pool_.num_pages(), 0);
  for (const auto& [sequence_id, sequence] : sequences_) {
    for (const int32_t page_id : sequence.pages) {
      if (page_id < 0 || page_id >= pool_.num_pages()) {
        throw std::runtime_error("sequence " + std::to_string(sequence_id) + ": its page table names page " +
                                 std::to_string(page_id) + ", which is not in the pool");
      }
      ++table_refs[page_id];
    }
  }
  pool_.check(table_refs, is_registered);
  check_sequences(is_registered);
}

void PageAllocator::check_sequences(std::span<const uint8_t> is_registered) const {
  for (const auto& [sequence_id, sequence] : sequences_) {
    const auto broken = [id = sequence_id](const std::string& what) {
      throw std::runtime_error("sequence " + std::to_string(id) + ": " + what);
    };
    if (sequence_id < 0 || sequence_id >= next_sequence_id_) broken("its id was never given out");
    if (sequence.length < 0 || sequence.length > sequence.reserved_len ||
        sequence.reserved_len > sequence.capacity(page_size_)) {
      broken("expected 0 <= length <= reserved_len <= capacity, got length " +
             std::to_string(sequence.length) + ", reserved_len " + std::to_string(sequence.reserved_len) +
             ", capacity " + std::to_string(sequence.capacity(page_size_)));
    }
    if (sequence.reserved_len == sequence.length) continue;
    const int64_t end_page = num_pages_for(sequence.reserved_len, page_size_);
    for (int64_t page_idx = sequence.length / page_size_; page_idx < end_page; ++page_idx) {
      const int32_t page_id = sequence.pages[page_idx];
      if (pool_.ref_count(page_id) != 1)
        broken("page " + std::to_string(page_id) + " is reserved, but shared");
      if (is_registered[page_id]) broken("page " + std::to_string(page_id) + " is reserved, but registered");
    }
  }
}

const Sequence& PageAllocator::find(int64_t sequence_id) const {
  const auto found = sequences_.find(sequence_id);
  if (found == sequences_.end()) {
    const bool is_known = sequence_id >= 0 && sequence_id < next_sequence_id_;
    throw std::out_of_range(expected_got("sequence_id", "a live sequence", sequence_id) +
                            (is_known ? ", which was freed" : ", which never existed"));
  }
  return found->second;
}

Sequence& PageAllocator::find(int64_t sequence_id) {
  return const_cast<Sequence&>(std::as_const(*this).find(sequence_id));
}

int32_t PageAllocator::checked_page(int64_t page_id) const {
  if (page_id < 0 || page_id >= pool_.num_pages()) {
    throw std::out_of_range(
        expected_got("page_id", "a value in [0, " + std::to_string(pool_.num_pages()) + ")", page_id));
  }
  return static_cast<int32_t>(page_id);
}

void PageAllocator::drop_pages(Sequence& sequence, int64_t num_kept) noexcept {
  if (num_kept < sequence.num_pages()) ++sequence.table_version;
  // Last page first: a cached page is then evicted before the pages it continues, without which it could not
  // be reached, and freed pages are given out again in ascending logical order.
  while (sequence.num_pages() > num_kept) {
    const int32_t page_id = sequence.pages.back();
    sequence.pages.pop_back();
    pool_.drop_ref(page_id, index_.contains_page(page_id));
  }
}

}  // namespace tinyserve::runtime
