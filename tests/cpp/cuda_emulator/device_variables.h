// CUDA's built-in variables. The machine sets them whenever it switches threads.
#pragma once

#include <cuda_runtime_api.h>

inline thread_local uint3 threadIdx = {0, 0, 0};
inline thread_local uint3 blockIdx = {0, 0, 0};
inline thread_local dim3 blockDim;
inline thread_local dim3 gridDim;
