// State changes of single pages and the two lists behind them (page_pool.h states the invariant).
#include "runtime/page_pool.h"

#include <cassert>
#include <stdexcept>
#include <string>

namespace tinyserve::runtime {

PagePool::PagePool(int32_t num_pages) { grow(num_pages); }

void PagePool::grow(int32_t num_pages) {
  assert(num_pages >= this->num_pages());
  const int32_t first_new = this->num_pages();
  pages_.resize(num_pages);
  for (int32_t page_id = first_new; page_id < num_pages; ++page_id)
    push_back(free_, page_id, PageState::kFree);
}

int32_t PagePool::take_free() noexcept {
  const int32_t page_id = free_.head;
  assert(page_id != kNoPage);
  unlink(page_id);
  pages_[page_id].num_refs = 1;
  return page_id;
}

void PagePool::release_cached(int32_t page_id) noexcept {
  assert(pages_[page_id].state == PageState::kCached);
  unlink(page_id);
  push_front(free_, page_id, PageState::kFree);
}

void PagePool::add_ref(int32_t page_id) noexcept {
  assert(pages_[page_id].state != PageState::kFree);
  unlink(page_id);
  ++pages_[page_id].num_refs;
}

void PagePool::add_pin(int32_t page_id) noexcept {
  assert(pages_[page_id].state != PageState::kFree);
  unlink(page_id);
  ++pages_[page_id].num_pins;
}

void PagePool::drop_ref(int32_t page_id, bool is_registered) noexcept {
  assert(pages_[page_id].num_refs > 0);
  --pages_[page_id].num_refs;
  settle(page_id, is_registered);
}

void PagePool::drop_pin(int32_t page_id, bool is_registered) noexcept {
  assert(pages_[page_id].num_pins > 0);
  --pages_[page_id].num_pins;
  settle(page_id, is_registered);
}

void PagePool::settle(int32_t page_id, bool is_registered) noexcept {
  if (pages_[page_id].num_refs > 0 || pages_[page_id].num_pins > 0) return;
  if (is_registered) {
    push_back(cached_, page_id, PageState::kCached);
  } else {
    push_front(free_, page_id, PageState::kFree);
  }
}

void PagePool::push_front(List& list, int32_t page_id, PageState state) noexcept {
  Page& page = pages_[page_id];
  page.state = state;
  page.prev = kNoPage;
  page.next = list.head;
  (list.head == kNoPage ? list.tail : pages_[list.head].prev) = page_id;
  list.head = page_id;
  ++list.size;
}

void PagePool::push_back(List& list, int32_t page_id, PageState state) noexcept {
  Page& page = pages_[page_id];
  page.state = state;
  page.prev = list.tail;
  page.next = kNoPage;
  (list.tail == kNoPage ? list.head : pages_[list.tail].next) = page_id;
  list.tail = page_id;
  ++list.size;
}

void PagePool::unlink(int32_t page_id) noexcept {
  Page& page = pages_[page_id];
  if (page.state == PageState::kHeld) return;
  List& list = page.state == PageState::kFree ? free_ : cached_;
  (page.prev == kNoPage ? list.head : pages_[page.prev].next) = page.next;
  (page.next == kNoPage ? list.tail : pages_[page.next].prev) = page.prev;
  --list.size;
  page.state = PageState::kHeld;
  page.prev = page.next = kNoPage;
}

void PagePool::check(std::span<const int32_t> table_refs, std::span<const uint8_t> is_registered) const {
  const auto broken = [](int32_t page_id, const std::string& what) {
    throw std::runtime_error("page pool: page " + std::to_string(page_id) + ": " + what);
  };
  if (table_refs.size() != pages_.size() || is_registered.size() != pages_.size()) {
    throw std::runtime_error("page pool: expected " + std::to_string(pages_.size()) +
                             " pages in the page tables and in the prefix index, got " +
                             std::to_string(table_refs.size()) + " and " +
                             std::to_string(is_registered.size()));
  }
  static constexpr const char* kStateNames[] = {"free", "cached", "held"};
  for (int32_t page_id = 0; page_id < num_pages(); ++page_id) {
    const Page& page = pages_[page_id];
    if (page.num_refs != table_refs[page_id]) {
      broken(page_id, "reference count is " + std::to_string(page.num_refs) + ", but page tables name it " +
                          std::to_string(table_refs[page_id]) + " times");
    }
    if (page.num_pins < 0) broken(page_id, "pin count is " + std::to_string(page.num_pins));
    const bool is_held = page.num_refs > 0 || page.num_pins > 0;
    const PageState expected = is_held                  ? PageState::kHeld
                               : is_registered[page_id] ? PageState::kCached
                                                        : PageState::kFree;
    if (page.state != expected) {
      broken(page_id, std::string("its holders and registration make it ") +
                          kStateNames[static_cast<int>(expected)] + ", but its state is " +
                          kStateNames[static_cast<int>(page.state)]);
    }
  }
  check_list(free_, PageState::kFree, "free");
  check_list(cached_, PageState::kCached, "cached");
}

void PagePool::check_list(const List& list, PageState state, const char* name) const {
  const auto broken = [name](const std::string& what) {
    throw std::runtime_error(std::string("page pool: ") + name + " list: " + what);
  };
  int32_t num_in_state = 0;
  for (const Page& page : pages_) num_in_state += page.state == state;
  int32_t prev = kNoPage;
  int32_t num_linked = 0;
  // The walk is bounded, so that a cycle is reported and not followed for ever.
  for (int32_t page_id = list.head; page_id != kNoPage; page_id = pages_[page_id].next) {
    if (page_id < 0 || page_id >= num_pages()) broken("links to page " + std::to_string(page_id));
    if (pages_[page_id].state != state) broken("page " + std::to_string(page_id) + " is in another state");
    if (pages_[page_id].prev != prev) broken("page " + std::to_string(page_id) + " has a wrong back link");
    if (++num_linked > num_in_state) broken("runs in a cycle");
    prev = page_id;
  }
  if (list.tail != prev) broken("its tail is not its last page");
  if (num_linked != num_in_state || num_linked != list.size) {
    broken("links " + std::to_string(num_linked) + " pages, counts " + std::to_string(list.size) + ", and " +
           std::to_string(num_in_state) + " pages are in that state");
  }
}

}  // namespace tinyserve::runtime
