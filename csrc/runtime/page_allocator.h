// Gives pages of a fixed-size pool to sequences: page tables with reference counts and copy-on-write,
// all-or-nothing reservations, and an LRU cache of registered pages for prefix reuse. Integers only: it owns
// no tensor. Invariant between calls: every page is free, cached or used, never two of them; a page may be
// written only by the one sequence that reserved it. A call that throws changes nothing. All methods may be
// called from any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/api.h"
#include "runtime/page_pool.h"
#include "runtime/prefix_index.h"
#include "runtime/reservation.h"
#include "runtime/sequence.h"

namespace tinyserve::runtime {

// Errors: std::out_of_range for an unknown sequence, page or position; std::invalid_argument for any other
// wrong argument. Both say what was expected and what came.
class TINYSERVE_API PageAllocator {
 public:
  PageAllocator(int64_t num_pages, int64_t page_size);

  int32_t num_pages() const;
  int64_t page_size() const noexcept { return page_size_; }
  // free + cached + used == num_pages. Used: in a page table, or pinned.
  int32_t num_free() const;
  int32_t num_cached() const;
  int32_t num_used() const;
  int64_t num_sequences() const;

  // Enlarges the pool to `num_pages` in total. Existing page ids stay as they are.
  void grow(int64_t num_pages);

  // An empty sequence. Ids count up and are never given twice, so a stale id is an error and not someone
  // else's data.
  int64_t new_sequence();
  // A sequence with the same length, sharing every page (reserved ones, too). It ends an open reservation of
  // the original: both have to reserve again before they write.
  int64_t fork(int64_t sequence_id);
  void free_sequence(int64_t sequence_id);

  int64_t length(int64_t sequence_id) const;
  int64_t capacity(int64_t sequence_id) const;  // num_pages_of * page_size
  int64_t num_pages_of(int64_t sequence_id) const;
  // A copy of the page table from logical page `start` (0 <= start <= num_pages_of) to its end.
  std::vector<int32_t> page_ids(int64_t sequence_id, int64_t start = 0) const;
  // Grows whenever an entry of the page table changes or is removed; appended entries leave it as it is. A
  // reader that holds a copy of the table and sees the same version only needs the entries after its own.
  int64_t page_table_version(int64_t sequence_id) const;

  // Makes the slots [length, length + num_new) of each sequence writable: appends pages, and replaces pages
  // that others share. All of it or, when free and cached pages do not suffice, nothing and nullopt. Before
  // writing, the caller performs the returned copies (distinct destinations, none of them a source; only
  // pages with committed tokens are copied). Reserving less than what is already reserved is free and takes
  // nothing back. A registered page that a crop reopened is copied while free pages are to spare; else it
  // loses its registration and is written in place, which takes no page at all.
  std::optional<std::vector<PageCopy>> try_reserve(std::span<const int64_t> sequence_ids,
                                                   std::span<const int64_t> num_new);
  // Adds written tokens to the length. They must have been reserved.
  void commit(int64_t sequence_id, int64_t num_new);
  // Shortens to `length` (at most the present one), ends an open reservation, and gives back all pages past
  // ceil(length / page_size). The last page keeps its content, its sharers and its registration until a
  // reservation.
  void crop(int64_t sequence_id, int64_t length);
  void reset(int64_t sequence_id) { crop(sequence_id, 0); }
  // Gives back the pages past ceil(length / page_size); what is reserved in the last page stays reserved.
  void trim(int64_t sequence_id);

  // Keeps a used or cached page from being freed, evicted or given out until as many unpins. It guards the
  // page, not its slots: a sequence that owns the page alone goes on writing to it.
  void pin(int64_t page_id);
  void unpin(int64_t page_id);

  // Registers a sealed page (full of committed tokens) under the key of its content: what the page's keys and
  // values depend on, earlier pages included. Registered pages outlive their last sequence as cached pages.
  // False, with nothing changed, when the key already belongs to another page or the page to another key or
  // other tokens.
  bool register_page(int64_t sequence_id, int64_t page_idx, std::string key, std::span<const int64_t> tokens);
  // On a hit (key known, tokens equal) appends the registered page to a sequence that ends at a page boundary
  // and has no pages in reserve, and adds page_size to its length. False on a miss.
  bool attach_cached(int64_t sequence_id, const std::string& key, std::span<const int64_t> tokens);

  int32_t ref_count(int64_t page_id) const;  // entries in page tables that name the page
  int32_t pin_count(int64_t page_id) const;

  // Verifies every invariant from scratch, O(pool); throws std::runtime_error naming the broken one.
  void check() const;

 private:
  // All private methods expect the lock to be held.
  Sequence& find(int64_t sequence_id);
  const Sequence& find(int64_t sequence_id) const;
  int32_t checked_page(int64_t page_id) const;
  void drop_pages(Sequence& sequence, int64_t num_kept) noexcept;
  void check_sequences(std::span<const uint8_t> is_registered) const;

  const int64_t page_size_;
  mutable std::mutex mutex_;  // guards everything below
  PagePool pool_;
  PrefixIndex index_;
  std::unordered_map<int64_t, Sequence> sequences_;
  int64_t next_sequence_id_ = 0;
};

}  // namespace tinyserve::runtime
