// Drives a kernel over its work items on torch's thread pool. Never throw inside: every check came before.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "cpu/kernel_table.h"

namespace tinyserve {

template <typename Params>
void run(cpu::Kernel<Params> kernel, const Params& params, int64_t num_items, int64_t grain = 1) {
  if (num_items <= 0) return;
  torch::stable::parallel_for(0, num_items, grain,
                              [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

}  // namespace tinyserve
