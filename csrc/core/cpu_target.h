// Which instruction-set target the CPU kernels run on, for `python -m tinyserve_ops` and bug reports.
#pragma once

#include <string>
#include <vector>

#include "core/api.h"

namespace tinyserve::core {

TINYSERVE_API const char* cpu_target_name();
TINYSERVE_API std::vector<std::string> available_cpu_targets();

}  // namespace tinyserve::core
