// What it takes to let a batch of sequences write new tokens: planned first, without touching anything, and
// applied only when the pages suffice. Invariant: once its memory is allocated, applying cannot fail, so a
// reservation happens in whole or not at all. Work is O(pages written), counting from the end of what is
// already reserved.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "runtime/page_pool.h"
#include "runtime/prefix_index.h"
#include "runtime/sequence.h"

namespace tinyserve::runtime {

// The caller copies the content of page `src` to page `dst`.
struct PageCopy {
  int32_t src = kNoPage;
  int32_t dst = kNoPage;

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

class Reservation {
 public:
  Reservation(const PagePool& pool, const PrefixIndex& index, int64_t page_size)
      : pool_(pool), index_(index), page_size_(page_size) {}

  // Plans room for `num_new` tokens after the sequence's length. A sequence may be added once.
  void add(Sequence& sequence, int64_t num_new);

  // Pages the plan cannot do without. Evicting every cached page is allowed for them.
  int64_t num_required() const noexcept { return num_appended_ + num_replaced_; }

  // Carries the plan out on the pool and index it was made for; num_required() pages must be free or cached.
  // The copies have distinct destinations, none of which is a source: they may be done in any order.
  std::vector<PageCopy> apply(PagePool& pool, PrefixIndex& index) const;

 private:
  // A page that exists already and cannot be written as it is.
  struct Rewrite {
    Sequence* sequence;
    int64_t page_idx;
    bool is_shared;  // other sequences keep the old page: a new one is required
  };
  struct Growth {
    Sequence* sequence;
    int64_t num_pages;
    int64_t reserved_len;
  };

  void plan_rewrite(Sequence& sequence, int64_t page_idx);

  const PagePool& pool_;
  const PrefixIndex& index_;
  int64_t page_size_;
  std::vector<Rewrite> rewrites_;
  std::vector<Growth> growths_;
  // Shared page -> references that earlier rewrites of this plan give up. When several sequences of one batch
  // write to one shared page, the last holder finds itself alone and keeps it.
  std::unordered_map<int32_t, int32_t> num_refs_given_up_;
  int64_t num_appended_ = 0;
  int64_t num_replaced_ = 0;   // rewrites of shared pages
  int64_t num_preserved_ = 0;  // rewrites of unshared registered pages with live tokens
};

}  // namespace tinyserve::runtime
