// What kernels may assume of the machine, and the only file that knows whether nvcc or the CPU emulator
// compiles them. Kernels are plain CUDA C++: threadIdx, __syncthreads, __shfl_xor_sync, atomicAdd and the
// like keep their names. What CUDA spells in PTX, and what differs between architectures or from the
// emulator, has a name here; the emulator implements the same names
// (tests/cpp/cuda_emulator/device_functions.h).
//
// Shared memory is dynamic only, taken by TINYSERVE_DYNAMIC_SHARED: so the emulator knows its exact size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/launch_config.h"

namespace tinyserve::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullWarp = 0xffffffffU;

}  // namespace tinyserve::cuda

#if defined(TINYSERVE_CUDA_EMULATOR)

#include "cuda_emulator/device_functions.h"

#else

// The dynamic shared memory of the block. 128 bytes suit every copy unit; a kernel that asks for more space
// than it is launched with overruns it silently here and loudly in the emulator.
#define TINYSERVE_DYNAMIC_SHARED(name)                                      \
  extern __shared__ __align__(128) unsigned char tinyserve_shared_memory[]; \
  unsigned char* const name = tinyserve_shared_memory

namespace tinyserve::cuda {

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// ---- Asynchronous copies, global to shared memory
// -------------------------------------------------------------------

// Copies kBytes, of which the first valid_bytes are read and the rest are zeros. Both addresses are aligned
// to kBytes. The destination is undefined until the thread has waited, and for other threads until a barrier
// after.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes.");
  if constexpr (kBytes == 16) {  // past L1: pages are read once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                 "n"(kBytes), "r"(valid_bytes)
                 : "memory");
  }
}

// Closes the group of the copies issued since the last one; an empty group counts as well.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kNewest of this thread's groups are under way.
template <int kNewest>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// ---- Tensor cores
// ---------------------------------------------------------------------------------------------------

// Loads kCount matrices of 8 x 8 16-bit elements. Lane 8 i + r gives the address of row r of matrix i (of 16
// bytes, aligned to them); lane l gets of each matrix row l / 4, columns 2 (l % 4) and the next, or with
// kTransposed column l / 4, rows 2 (l % 4) and the next.
template <int kCount, bool kTransposed = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&fragment)[kCount], const void* row) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "ldmatrix loads 1, 2 or 4 matrices.");
  const unsigned from = shared_address(row);
  if constexpr (kCount == 1 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (kCount == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (kCount == 2 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(from)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(from)
                 : "memory");
  } else if constexpr (!kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(from)
                 : "memory");
  }
}

// d [16 x 8] += a [16 x 16] * b [16 x 8]; T is __half or __nv_bfloat16, two of them in each register. With
// g = lane / 4 and c = lane % 4, the lower half of a register first:
//   a[0]: (g, 2c..)  a[1]: (g + 8, 2c..)  a[2]: (g, 2c + 8..)  a[3]: (g + 8, 2c + 8..)    row, column
//   b[0]: (2c.., g)  b[1]: (2c + 8.., g)                                                  row, column
//   d[0], d[1]: (g, 2c), (g, 2c + 1)      d[2], d[3]: the same of row g + 8
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>, "mma_m16n8k16 takes __half or __nv_bfloat16.");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// d [16 x 8] += a [16 x 32] * b [32 x 8] in int8, four in each register, lowest byte first:
//   a[0]: (g, 4c..)  a[1]: (g + 8, 4c..)  a[2]: (g, 4c + 16..)  a[3]: (g + 8, 4c + 16..)
//   b[0]: (4c.., g)  b[1]: (4c + 16.., g)   d as above
__device__ __forceinline__ void mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Between blocks
// -------------------------------------------------------------------------------------------------

// Adds, returns the value before. Release and acquire at device scope: what the block wrote before a barrier
// that this thread passed is seen by every thread that passes a barrier with the thread that reads the sum.
__device__ __forceinline__ uint32_t fetch_add_acq_rel(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
  return before;
}

// ---- Clusters (sm_90); elsewhere a cluster is one block
// -------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// A barrier of all threads of the cluster that also orders their writes to each other's shared memory. A
// block passes one before it first touches another's shared memory, and one before it exits.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// The same place in the shared memory of the block of that rank.
template <typename T>
__device__ __forceinline__ T* shared_of_rank(T* shared, unsigned rank) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return there;
}
// Programmatic dependent launch (LaunchConfig::overlap_previous).
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_size() { return 1; }
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
template <typename T>
__device__ __forceinline__ T* shared_of_rank(T* shared, unsigned) {
  return shared;
}
// griddepcontrol does not assemble for sm_80.
__device__ __forceinline__ void wait_for_previous_kernel() {}
__device__ __forceinline__ void let_next_kernel_begin() {}
#endif

// ---- Launch
// ---------------------------------------------------------------------------------------------------------

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (config.shared_bytes > kWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(config.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (config.cluster_size > 1) {
    cudaLaunchAttribute& cluster = attributes[num_attributes++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = config.cluster_size;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (config.overlap_previous) {
    cudaLaunchAttribute& overlap = attributes[num_attributes++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t native = {};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.shared_bytes;
  native.stream = config.stream;
  native.attrs = attributes;
  native.numAttrs = num_attributes;
  return cudaLaunchKernelEx(&native, kernel, std::forward<Args>(args)...);
}

}  // namespace tinyserve::cuda

#endif
