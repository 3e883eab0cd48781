// Look-up and upkeep of registered pages (prefix_index.h states the invariant).
#include "runtime/prefix_index.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tinyserve::runtime {

int32_t PrefixIndex::find(const std::string& key, std::span<const int64_t> tokens) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end() || !std::ranges::equal(found->second.tokens, tokens)) return kNoPage;
  return found->second.page_id;
}

bool PrefixIndex::insert(int32_t page_id, std::string key, std::span<const int64_t> tokens) {
  if (by_page_[page_id] != nullptr) return find(key, tokens) == page_id;
  Entry entry{.page_id = page_id, .tokens = {tokens.begin(), tokens.end()}};
  const auto [node, is_new] = by_key_.try_emplace(std::move(key), std::move(entry));
  if (is_new) by_page_[page_id] = &*node;
  return is_new;
}

void PrefixIndex::erase(int32_t page_id) noexcept {
  if (by_page_[page_id] == nullptr) return;
  by_key_.erase(by_key_.find(by_page_[page_id]->first));
  by_page_[page_id] = nullptr;
}

std::vector<uint8_t> PrefixIndex::check(int64_t page_size) const {
  const auto broken = [](int32_t page_id, const char* what) {
    throw std::runtime_error("prefix index: page " + std::to_string(page_id) + ": " + what);
  };
  std::vector<uint8_t> is_registered(by_page_.size(), 0);
  for (const auto& node : by_key_) {
    const int32_t page_id = node.second.page_id;
    if (page_id < 0 || page_id >= static_cast<int32_t>(by_page_.size()))
      broken(page_id, "registered, but not in the pool");
    if (is_registered[page_id]) broken(page_id, "registered under two keys");
    if (by_page_[page_id] != &node) broken(page_id, "its key leads to it, but it does not lead to its key");
    if (static_cast<int64_t>(node.second.tokens.size()) != page_size)
      broken(page_id, "registered tokens do not fill a page");
    is_registered[page_id] = 1;
  }
  for (int32_t page_id = 0; page_id < static_cast<int32_t>(by_page_.size()); ++page_id) {
    if (contains_page(page_id) && !is_registered[page_id]) broken(page_id, "it leads to a key that is gone");
  }
  return is_registered;
}

}  // namespace tinyserve::runtime
