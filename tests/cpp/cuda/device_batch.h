// A batch as kernels read it that find sequences and rows on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/params.h"

namespace tinyserve::cuda::testing {

struct DeviceBatch {
  int64_t max_pages = 0;
  std::vector<int32_t> cu_query_lens = {0};
  std::vector<int32_t> seq_lens = {};
  // [batch_size, max_pages + 1]: behind each row a page that is there, but not the row's.
  std::vector<int32_t> page_table = {};

  explicit DeviceBatch(int64_t table_width) : max_pages(table_width) {}

  void add(int64_t seq_len, int32_t num_new, const std::vector<int32_t>& pages = {}) {
    seq_lens.push_back(static_cast<int32_t>(seq_len));
    cu_query_lens.push_back(cu_query_lens.back() + num_new);
    page_table.insert(page_table.end(), pages.begin(), pages.end());
    page_table.resize(seq_lens.size() * static_cast<size_t>(max_pages + 1) - 1, -1);
    page_table.push_back(0);
  }

  core::BatchView view() const {
    return {.cu_query_lens = cu_query_lens.data(),
            .seq_lens = seq_lens.data(),
            .page_table = page_table.data(),
            .page_table_stride = max_pages + 1,
            .batch_size = static_cast<int64_t>(seq_lens.size()),
            .max_pages = max_pages};
  }
};

}  // namespace tinyserve::cuda::testing
