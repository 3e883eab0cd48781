// Content key -> the page that holds that content, with the tokens it stands for. Invariant: one page a key
// and one key a page, both directions agreeing. A key alone is never believed: the tokens are compared on
// every hit, so two contents whose keys collide cannot be taken for each other. Not thread-safe; the
// allocator locks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/api.h"
#include "runtime/page_pool.h"

namespace tinyserve::runtime {

class TINYSERVE_API PrefixIndex {
 public:
  explicit PrefixIndex(int32_t num_pages) : by_page_(num_pages, nullptr) {}

  // Growing in two steps lets the owner grow several parts together: only the first can throw.
  void reserve(int32_t num_pages) { by_page_.reserve(num_pages); }
  void grow(int32_t num_pages) noexcept { by_page_.resize(num_pages, nullptr); }

  // The page registered under the key; kNoPage where there is none or where its tokens are others.
  int32_t find(const std::string& key, std::span<const int64_t> tokens) const;

  bool contains_page(int32_t page_id) const noexcept { return by_page_[page_id] != nullptr; }

  // True when afterwards exactly this page stands for this key and these tokens. False, with nothing changed,
  // when the key already belongs to another page (the first one stays) or the page to another key or other
  // tokens.
  bool insert(int32_t page_id, std::string key, std::span<const int64_t> tokens);

  // Forgets the page's registration, if it has one.
  void erase(int32_t page_id) noexcept;

  // page -> 1 where registered; throws std::runtime_error naming the broken invariant.
  std::vector<uint8_t> check(int64_t page_size) const;

 private:
  struct Entry {
    int32_t page_id = kNoPage;
    std::vector<int64_t> tokens;  // [page_size]
  };
  using Map = std::unordered_map<std::string, Entry>;

  Map by_key_;
  std::vector<const Map::value_type*> by_page_;  // nodes of by_key_ (their addresses are stable) or null
};

}  // namespace tinyserve::runtime
