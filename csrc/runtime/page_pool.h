// Who holds each physical page, and which page is given out next. Invariant: the holders alone decide a
// page's state, and the state alone decides its list. Held: in a page table or pinned; in no list. Cached: no
// holder, but its content is registered; in the cached list, least recently used first. Free: neither; in the
// free list. Every operation is O(1): both lists run through the page records themselves. Not thread-safe;
// the allocator locks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/api.h"

namespace tinyserve::runtime {

inline constexpr int32_t kNoPage = -1;

enum class PageState : uint8_t { kFree, kCached, kHeld };

class TINYSERVE_API PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  // Adds free pages up to a new total, which is not below the old one. Unchanged if it throws. New pages are
  // given out last, so that pool memory that was never touched stays untouched as long as possible.
  void grow(int32_t num_pages);

  int32_t num_pages() const noexcept { return static_cast<int32_t>(pages_.size()); }
  int32_t num_free() const noexcept { return free_.size; }
  int32_t num_cached() const noexcept { return cached_.size; }
  int32_t num_held() const noexcept { return num_pages() - free_.size - cached_.size; }

  PageState state(int32_t page_id) const noexcept { return pages_[page_id].state; }
  // References from page tables; a pin is counted apart.
  int32_t ref_count(int32_t page_id) const noexcept { return pages_[page_id].num_refs; }
  int32_t pin_count(int32_t page_id) const noexcept { return pages_[page_id].num_pins; }

  // Takes a page from the free list (which must not be empty) and gives it its first reference.
  int32_t take_free() noexcept;
  // The page to evict next; kNoPage when nothing is cached.
  int32_t oldest_cached() const noexcept { return cached_.head; }
  // Moves a cached page, whose registration is gone, to the free list.
  void release_cached(int32_t page_id) noexcept;

  // The page is held or cached (a free page has no content to share or to keep).
  void add_ref(int32_t page_id) noexcept;
  void add_pin(int32_t page_id) noexcept;
  // The last holder's leave sends the page to the cached list if it is registered, else to the free list.
  void drop_ref(int32_t page_id, bool is_registered) noexcept;
  void drop_pin(int32_t page_id, bool is_registered) noexcept;

  // Recomputes everything from `table_refs` (page -> entries in page tables) and `is_registered` (page -> 0
  // or 1); throws std::runtime_error naming the first broken invariant.
  void check(std::span<const int32_t> table_refs, std::span<const uint8_t> is_registered) const;

 private:
  struct Page {
    int32_t num_refs = 0;
    int32_t num_pins = 0;
    int32_t prev = kNoPage;  // neighbours in the list of its state; kNoPage when held
    int32_t next = kNoPage;
    PageState state = PageState::kHeld;
  };
  struct List {
    int32_t head = kNoPage;
    int32_t tail = kNoPage;
    int32_t size = 0;
  };

  void push_front(List& list, int32_t page_id, PageState state) noexcept;
  void push_back(List& list, int32_t page_id, PageState state) noexcept;
  void unlink(int32_t page_id) noexcept;  // a held page stays as it is
  void settle(int32_t page_id, bool is_registered) noexcept;
  void check_list(const List& list, PageState state, const char* name) const;

  std::vector<Page> pages_;
  List free_;    // taken and given back at the front: the page most recently used is the warmest
  List cached_;  // joined at the back, evicted at the front
};

}  // namespace tinyserve::runtime
