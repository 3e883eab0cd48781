// The kernels of one CPU target. Each works on a half-open range of work items and neither allocates
// nor throws, so any driver (torch's thread pool, std::thread in the tests) can split the range.
#pragma once

#include <cstdint>

#include "core/api.h"
#include "core/params.h"

namespace tinyserve::cpu {

template <typename Params>
using Kernel = void (*)(const Params& params, int64_t begin, int64_t end);

struct KernelTable {
  const char* target;
  Kernel<core::AppendKvParams> append_kv;        // items: write * num_kv_heads + head
  Kernel<core::SealPagesParams> seal_pages;      // items: page * num_kv_heads + head
  Kernel<core::ScorePagesParams> score_pages;    // items: (row * max_chunks + chunk) * num_kv_heads + head
  Kernel<core::ScorePagesParams> join_scores;    // items: row * num_kv_heads + head
  Kernel<core::SelectPagesParams> select_pages;  // items: row * num_kv_heads + head
  Kernel<core::AttendPagesParams> attend_pages;  // items: (row * max_chunks + chunk) * num_kv_heads + head
  Kernel<core::MergeStatesParams> merge_states;  // items: row * num_heads + head
  Kernel<core::PrefillAttentionParams> prefill_attention;  // items: block * num_kv_heads + head
};

// The table of the best target this machine runs, or of the one TINYSERVE_CPU_TARGET names.
TINYSERVE_API const KernelTable& kernels();

// The table of a named target; null where it was not built or this machine cannot run it.
TINYSERVE_API const KernelTable* kernels_of(const char* target);

namespace scalar {
extern const KernelTable kKernels;
}
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
namespace avx512vnni {
extern const KernelTable kKernels;
}
namespace avx512bf16 {
extern const KernelTable kKernels;
}

}  // namespace tinyserve::cpu
