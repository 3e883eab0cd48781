// Planning and carrying out of all-or-nothing reservations (reservation.h states the invariant).
#include "runtime/reservation.h"

#include <algorithm>

namespace tinyserve::runtime {
namespace {

// A free page with one reference, evicting the least recently used cached page when none is free.
int32_t take_page(PagePool& pool, PrefixIndex& index) noexcept {
  if (pool.num_free() == 0) {
    const int32_t evicted = pool.oldest_cached();
    index.erase(evicted);
    pool.release_cached(evicted);
  }
  return pool.take_free();
}

// vector::reserve alone gives exactly what is asked, which would move the whole table at every appended page.
void reserve_geometrically(std::vector<int32_t>& pages, size_t size) {
  if (size > pages.capacity()) pages.reserve(std::max(size, 2 * pages.capacity()));
}

}  // namespace

void Reservation::add(Sequence& sequence, int64_t num_new) {
  const int64_t end = sequence.length + num_new;
  if (end <= sequence.reserved_len) return;
  // The last page of an open reservation is exclusive already; the last committed page may be shared.
  const int64_t first_page = sequence.reserved_len > sequence.length
                                 ? num_pages_for(sequence.reserved_len, page_size_)
                                 : sequence.length / page_size_;
  const int64_t end_page = num_pages_for(end, page_size_);
  const int64_t end_existing = std::min(end_page, sequence.num_pages());
  for (int64_t page_idx = first_page; page_idx < end_existing; ++page_idx) plan_rewrite(sequence, page_idx);
  const int64_t num_appended = std::max<int64_t>(0, end_page - sequence.num_pages());
  growths_.push_back({.sequence = &sequence, .num_pages = num_appended, .reserved_len = end});
  num_appended_ += num_appended;
}

void Reservation::plan_rewrite(Sequence& sequence, int64_t page_idx) {
  const int32_t page_id = sequence.pages[page_idx];
  if (pool_.ref_count(page_id) > 1) {
    int32_t& given_up = num_refs_given_up_[page_id];
    if (pool_.ref_count(page_id) - given_up > 1) {
      ++given_up;
      ++num_replaced_;
      rewrites_.push_back({.sequence = &sequence, .page_idx = page_idx, .is_shared = true});
      return;
    }
  }
  if (!index_.contains_page(page_id)) return;
  num_preserved_ += page_idx * page_size_ < sequence.length;
  rewrites_.push_back({.sequence = &sequence, .page_idx = page_idx, .is_shared = false});
}

std::vector<PageCopy> Reservation::apply(PagePool& pool, PrefixIndex& index) const {
  std::vector<PageCopy> copies;
  copies.reserve(rewrites_.size());
  for (const Growth& growth : growths_) {
    reserve_geometrically(growth.sequence->pages, growth.sequence->pages.size() + growth.num_pages);
  }
  // Nothing below allocates.

  // A registered page that was reopened has one owner, who may write it once its registration is dropped.
  // While free pages are to spare it is copied instead and stays in the cache; that is never worth the
  // eviction of another page.
  const bool preserve_cached = num_required() + num_preserved_ <= pool.num_free();
  for (const Rewrite& rewrite : rewrites_) {
    Sequence& sequence = *rewrite.sequence;
    const int32_t old_page = sequence.pages[rewrite.page_idx];
    const bool has_live_tokens = rewrite.page_idx * page_size_ < sequence.length;
    if (!rewrite.is_shared && !(preserve_cached && has_live_tokens)) {
      index.erase(old_page);
      continue;
    }
    const int32_t new_page = take_page(pool, index);
    pool.drop_ref(old_page, index.contains_page(old_page));
    sequence.pages[rewrite.page_idx] = new_page;
    ++sequence.table_version;
    if (has_live_tokens) copies.push_back({.src = old_page, .dst = new_page});
  }
  for (const Growth& growth : growths_) {
    for (int64_t i = 0; i < growth.num_pages; ++i) growth.sequence->pages.push_back(take_page(pool, index));
    growth.sequence->reserved_len = growth.reserved_len;
  }
  return copies;
}

}  // namespace tinyserve::runtime
