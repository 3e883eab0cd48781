// One sequence's page table and lengths, as they stand between two steps.
// Invariant: length <= reserved_len <= capacity, and every page with a slot in [length, reserved_len) belongs
// to this sequence alone and is not registered, so those slots may be written without asking again.
#pragma once

#include <cstdint>
#include <vector>

namespace tinyserve::runtime {

struct Sequence {
  std::vector<int32_t>
      pages;                  // logical page -> page id; may reach past reserved_len (pages shared by a fork)
  int64_t length = 0;         // committed tokens: what attention may read
  int64_t reserved_len = 0;   // end of the slots that may be written; == length when no reservation is open
  int64_t table_version = 0;  // grows when an entry of `pages` changes or goes, not when one is appended

  int64_t num_pages() const noexcept { return static_cast<int64_t>(pages.size()); }
  int64_t capacity(int64_t page_size) const noexcept { return num_pages() * page_size; }
};

// Pages that `num_tokens` tokens need.
constexpr int64_t num_pages_for(int64_t num_tokens, int64_t page_size) noexcept {
  return (num_tokens + page_size - 1) / page_size;
}

}  // namespace tinyserve::runtime
