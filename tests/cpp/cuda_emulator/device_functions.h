// CUDA's device functions and those of cuda/arch.cuh, for kernels that run on the emulator. Included by
// arch.cuh alone. Each waiting function takes its place in the source along, for the errors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda_emulator/device_variables.h"
#include "cuda_emulator/machine.h"
#include "cuda_emulator/tensor_core.h"

#define __launch_bounds__(...)
// Shared memory is dynamic, so that the emulator knows its size.
#undef __shared__
#define __shared__ TINYSERVE_DYNAMIC_SHARED_is_the_only_way_to_shared_memory

#define TINYSERVE_DYNAMIC_SHARED(name) \
  unsigned char* const name =          \
      reinterpret_cast<unsigned char*>(::tinyserve::cuda::emulator::shared_memory().begin)

#define TINYSERVE_HERE std::source_location where = std::source_location::current()

// ---- Barriers and fences
// --------------------------------------------------------------------------------------------

inline void __syncthreads(TINYSERVE_HERE) {
  tinyserve::cuda::emulator::block_barrier({"__syncthreads", where}, 0);
}
inline int __syncthreads_count(int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::block_barrier({"__syncthreads_count", where}, predicate != 0);
}
inline int __syncthreads_or(int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::block_barrier({"__syncthreads_or", where}, predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::block_barrier({"__syncthreads_and", where}, predicate == 0) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffU, TINYSERVE_HERE) {
  tinyserve::cuda::emulator::exchange({"__syncwarp", where}, mask, "", 0);
}
// Threads take turns on one CPU: memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- Warp collectives
// -----------------------------------------------------------------------------------------------

namespace tinyserve::cuda::emulator {

// The value of another lane, which `source` names from the own lane and the first one of its segment of
// `width` lanes; below 0 or behind the segment stands for the own value. From a lane outside of the mask CUDA
// leaves it undefined.
template <typename T, typename Source>
T shuffle(const Site& site, unsigned mask, T value, int width, Source source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "Shuffles move up to 8 bytes.");
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail(site, "expected a width of 1, 2, 4, 8, 16 or 32, got " + std::to_string(width));
  }
  const int lane = lane_id();
  const int segment = lane / width * width;
  const int from = source(lane, segment);
  const std::shared_ptr<const LaneValues> values = exchange(site, mask, &value, sizeof(T));
  if (from < 0 || from >= segment + width) return value;
  if ((mask >> from & 1U) == 0) {
    fail(site, "expected to read a lane of the mask, got lane " + std::to_string(from));
  }
  return values->of<T>(from);
}

template <typename T, typename Operation>
T reduce(const Site& site, unsigned mask, T value, Operation operation) {
  const std::shared_ptr<const LaneValues> values = exchange(site, mask, &value, sizeof(T));
  int lane = std::countr_zero(mask);
  T result = values->of<T>(lane);
  while (++lane < 32) {
    if ((mask >> lane & 1U) != 0) result = operation(result, values->of<T>(lane));
  }
  return result;
}

inline unsigned ballot(const Site& site, unsigned mask, int predicate) {
  const unsigned bit = predicate != 0 ? 1U << lane_id() : 0U;
  return reduce(site, mask, bit, [](unsigned a, unsigned b) { return a | b; });
}

}  // namespace tinyserve::cuda::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::shuffle({"__shfl_sync", where}, mask, value, width,
                                            [=](int, int segment) { return segment + (lane & (width - 1)); });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::shuffle({"__shfl_up_sync", where}, mask, value, width,
                                            [=](int own, int segment) {
                                              const int from = own - static_cast<int>(delta);
                                              return from >= segment ? from : -1;
                                            });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::shuffle({"__shfl_down_sync", where}, mask, value, width,
                                            [=](int own, int) { return own + static_cast<int>(delta); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::shuffle({"__shfl_xor_sync", where}, mask, value, width,
                                            [=](int own, int) { return own ^ lane_mask; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::ballot({"__ballot_sync", where}, mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::ballot({"__any_sync", where}, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::ballot({"__all_sync", where}, mask, predicate) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, TINYSERVE_HERE) {
  const std::shared_ptr<const tinyserve::cuda::emulator::LaneValues> values =
      tinyserve::cuda::emulator::exchange({"__match_any_sync", where}, mask, &value, sizeof(T));
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) != 0 && values->of<T>(lane) == value) same |= 1U << lane;
  }
  return same;
}

template <typename T>
T __reduce_add_sync(unsigned mask, T value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_add_sync", where}, mask, value, [](T a, T b) {
    return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_min_sync", where}, mask, value,
                                           [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_max_sync", where}, mask, value,
                                           [](T a, T b) { return a > b ? a : b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_and_sync", where}, mask, value,
                                           [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_or_sync", where}, mask, value,
                                           [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, TINYSERVE_HERE) {
  return tinyserve::cuda::emulator::reduce({"__reduce_xor_sync", where}, mask, value,
                                           [](unsigned a, unsigned b) { return a ^ b; });
}

// ---- Atomics
// --------------------------------------------------------------------------------------------------------

namespace tinyserve::cuda::emulator {

// Threads switch only in waits, so a plain update is atomic; before it, another thread may come first.
template <typename T, typename Operation>
T update(T* address, Operation operation) {
  may_be_overtaken();
  const T before = *address;
  *address = operation(before);
  return before;
}

}  // namespace tinyserve::cuda::emulator

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return static_cast<T>(x + value); });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return value < x ? value : x; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return value > x ? value : x; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return x | value; });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return x & value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return tinyserve::cuda::emulator::update(address, [=](T x) { return x == expected ? value : x; });
}

// ---- Numbers and bits
// -----------------------------------------------------------------------------------------------

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes of b and a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7U) & 0xffU) << 8 * i;
  return result;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}

// ---- cuda/arch.cuh
// --------------------------------------------------------------------------------------------------

namespace tinyserve::cuda {

template <int kBytes>
void cp_async(void* shared, const void* global, int valid_bytes = kBytes, TINYSERVE_HERE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes.");
  emulator::start_copy({"cp_async", where}, shared, global, kBytes, valid_bytes);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kNewest>
void cp_async_wait() {
  emulator::wait_for_copies(kNewest);
}

template <int kCount, bool kTransposed = false>
void ldmatrix(uint32_t (&fragment)[kCount], const void* row, TINYSERVE_HERE) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "ldmatrix loads 1, 2 or 4 matrices.");
  emulator::ldmatrix({"ldmatrix", where}, fragment, kCount, kTransposed, row);
}
template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], TINYSERVE_HERE) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>,
                "mma_m16n8k16 takes __half or __nv_bfloat16.");
  emulator::mma<T>({"mma_m16n8k16", where}, d, a, b);
}
inline void mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], TINYSERVE_HERE) {
  emulator::mma<int8_t>({"mma_m16n8k32", where}, d, a, b);
}

inline uint32_t fetch_add_acq_rel(uint32_t* counter, uint32_t value) { return atomicAdd(counter, value); }

inline unsigned cluster_rank() { return emulator::rank_in_cluster(); }
inline unsigned cluster_size() { return emulator::blocks_of_cluster(); }
inline void cluster_sync(TINYSERVE_HERE) { emulator::cluster_barrier({"cluster_sync", where}); }
template <typename T>
T* shared_of_rank(T* shared, unsigned rank, TINYSERVE_HERE) {
  const auto there = emulator::shared_memory_of({"shared_of_rank", where}, rank);
  return reinterpret_cast<T*>(there.begin +
                              (reinterpret_cast<std::byte*>(shared) - emulator::shared_memory().begin));
}

// Kernels of a stream run one after the other here.
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_begin() {}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  emulator::run_grid(config, [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace tinyserve::cuda

#undef TINYSERVE_HERE
