// This target's row of the dispatch table.

#include "cpu/kernel_table.h"

#include "cpu/kernels.h"

#define TINYSERVE_STRINGIFY_(x) #x
#define TINYSERVE_STRINGIFY(x) TINYSERVE_STRINGIFY_(x)

namespace tinyserve::cpu::TINYSERVE_TARGET {

const KernelTable kKernels = {
    .target = TINYSERVE_STRINGIFY(TINYSERVE_TARGET),
    .append_kv = append_kv,
    .seal_pages = seal_pages,
    .score_pages = score_pages,
    .select_pages = select_pages,
    .attend_pages = attend_pages,
    .merge_states = merge_states,
    .prefill_attention = prefill_attention,
};

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
