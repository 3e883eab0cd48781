// Under which namespace and key the ops of a library file are registered: `tinyserve`, the CUDA ones for
// CUDA. The tests build the CUDA ops a second time, over kernels that run on the emulator, and then give both
// names.
#pragma once

#include <torch/csrc/stable/library.h>

#ifndef TINYSERVE_OPS_NAMESPACE
#define TINYSERVE_OPS_NAMESPACE tinyserve
#endif
#ifndef TINYSERVE_CUDA_KEY
#define TINYSERVE_CUDA_KEY CUDA
#endif

// One step between, or the names above would be taken literally.
#define TINYSERVE_DEFINE_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define TINYSERVE_SCHEMAS(m) TINYSERVE_DEFINE_LIBRARY(TINYSERVE_OPS_NAMESPACE, m)
#define TINYSERVE_CPU_OPS(m) STABLE_TORCH_LIBRARY_IMPL(TINYSERVE_OPS_NAMESPACE, CPU, m)
#define TINYSERVE_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(TINYSERVE_OPS_NAMESPACE, TINYSERVE_CUDA_KEY, m)
