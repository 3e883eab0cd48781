// Chooses the kernel table once, at first use. Compiled for the baseline, outside the per-target objects.

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/cpu_target.h"
#include "cpu/kernel_table.h"

namespace tinyserve::cpu {
namespace {

struct Target {
  const KernelTable* table;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool runs_avx512vnni() {
  return __builtin_cpu_supports("x86-64-v4") != 0 && __builtin_cpu_supports("avx512vnni") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0;
}
#endif

// Best first.
const Target kTargets[] = {
#if defined(__x86_64__)
    {&avx512bf16::kKernels, [] { return runs_avx512vnni() && __builtin_cpu_supports("avx512bf16") != 0; }},
    {&avx512vnni::kKernels, runs_avx512vnni},
    {&avx512::kKernels, [] { return __builtin_cpu_supports("x86-64-v4") != 0; }},
    {&avx2::kKernels, [] { return __builtin_cpu_supports("x86-64-v3") != 0; }},
#endif
    {&scalar::kKernels, [] { return true; }},
};

const KernelTable& choose() {
  if (const char* wanted = std::getenv("TINYSERVE_CPU_TARGET"); wanted != nullptr && *wanted != '\0') {
    if (const KernelTable* table = kernels_of(wanted)) return *table;
    std::string names;
    for (const std::string& name : core::available_cpu_targets()) names += (names.empty() ? "" : ", ") + name;
    throw std::runtime_error("TINYSERVE_CPU_TARGET: expected one of " + names + " on this machine, got '" +
                             wanted + "'");
  }
  for (const Target& target : kTargets) {
    if (target.runs_here()) return *target.table;
  }
  return scalar::kKernels;
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

const KernelTable* kernels_of(const char* name) {
  for (const Target& target : kTargets) {
    if (std::strcmp(target.table->target, name) == 0 && target.runs_here()) return target.table;
  }
  return nullptr;
}

}  // namespace tinyserve::cpu

namespace tinyserve::core {

const char* cpu_target_name() { return cpu::kernels().target; }

std::vector<std::string> available_cpu_targets() {
  std::vector<std::string> names;
  for (const cpu::Target& target : cpu::kTargets) {
    if (target.runs_here()) names.emplace_back(target.table->target);
  }
  return names;
}

}  // namespace tinyserve::core
