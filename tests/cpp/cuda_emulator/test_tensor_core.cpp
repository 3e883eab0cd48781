// mma and ldmatrix of the emulator: fragments are filled and read by the tables of the PTX ISA, matrices are
// multiplied by a plain loop in fp64.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/arch.cuh"
#include "cuda_emulator/testing.h"

using namespace tinyserve::cuda;
using Catch::Matchers::ContainsSubstring;
using emulator::KernelError;
using emulator::same_under_every_schedule;

namespace {

struct Place {
  int row;
  int column;
};

// Element i of a lane's fragment, as the PTX ISA counts them: a0..a7 (16-bit) or a0..a15 (8-bit).
Place place_of_a16(int lane, int i) {
  const int group = lane >> 2;
  const int in_group = lane % 4;
  const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
  return {row, in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Place place_of_b16(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane >> 2}; }
Place place_of_a8(int lane, int i) {
  const int group = lane >> 2;
  const int row = (i < 4 || (i >= 8 && i < 12)) ? group : group + 8;
  return {row, lane % 4 * 4 + (i & 3) + (i >= 8 ? 16 : 0)};
}
Place place_of_b8(int lane, int i) { return {lane % 4 * 4 + (i & 3) + (i >= 4 ? 16 : 0), lane >> 2}; }
Place place_of_c(int lane, int i) { return {(lane >> 2) + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

template <typename T, typename Accumulator, int kDepth>
struct Problem {
  std::vector<T> a = std::vector<T>(16 * kDepth);
  std::vector<T> b = std::vector<T>(kDepth * 8);
  std::vector<Accumulator> c = std::vector<Accumulator>(16 * 8);
};

template <typename T>
__global__ void multiply_16(const T* a, const T* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  T a_elements[8];
  T b_elements[4];
  float sums[4];
  for (int i = 0; i < 8; ++i)
    a_elements[i] = a[place_of_a16(lane, i).row * 16 + place_of_a16(lane, i).column];
  for (int i = 0; i < 4; ++i) b_elements[i] = b[place_of_b16(lane, i).row * 8 + place_of_b16(lane, i).column];
  for (int i = 0; i < 4; ++i) sums[i] = c[place_of_c(lane, i).row * 8 + place_of_c(lane, i).column];
  uint32_t a_registers[4];
  uint32_t b_registers[2];
  std::memcpy(a_registers, a_elements, sizeof(a_registers));
  std::memcpy(b_registers, b_elements, sizeof(b_registers));
  mma_m16n8k16<T>(sums, a_registers, b_registers);
  for (int i = 0; i < 4; ++i) d[place_of_c(lane, i).row * 8 + place_of_c(lane, i).column] = sums[i];
}

__global__ void multiply_8(const int8_t* a, const int8_t* b, const int32_t* c, int32_t* d) {
  const int lane = static_cast<int>(threadIdx.x);
  int8_t a_elements[16];
  int8_t b_elements[8];
  int32_t sums[4];
  for (int i = 0; i < 16; ++i) a_elements[i] = a[place_of_a8(lane, i).row * 32 + place_of_a8(lane, i).column];
  for (int i = 0; i < 8; ++i) b_elements[i] = b[place_of_b8(lane, i).row * 8 + place_of_b8(lane, i).column];
  for (int i = 0; i < 4; ++i) sums[i] = c[place_of_c(lane, i).row * 8 + place_of_c(lane, i).column];
  uint32_t a_registers[4];
  uint32_t b_registers[2];
  std::memcpy(a_registers, a_elements, sizeof(a_registers));
  std::memcpy(b_registers, b_elements, sizeof(b_registers));
  mma_m16n8k32(sums, a_registers, b_registers);
  for (int i = 0; i < 4; ++i) d[place_of_c(lane, i).row * 8 + place_of_c(lane, i).column] = sums[i];
}

template <typename T>
void require_product() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Problem<T, float, 16> problem;
  for (T& x : problem.a) x = T(normal(random));
  for (T& x : problem.b) x = T(normal(random));
  for (float& x : problem.c) x = normal(random);
  const auto d = same_under_every_schedule([&] {
    std::vector<float> out(16 * 8);
    launch(&multiply_16<T>, {.block = {32}}, problem.a.data(), problem.b.data(), problem.c.data(),
           out.data());
    return out;
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = problem.c[row * 8 + column];
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(static_cast<float>(problem.a[row * 16 + k])) *
               static_cast<double>(static_cast<float>(problem.b[k * 8 + column]));
      }
      CAPTURE(row, column);
      REQUIRE(std::fabs(d[row * 8 + column] - sum) <= 1e-6 * std::fabs(sum) + 1e-12);
    }
  }
}

}  // namespace

TEST_CASE("mma multiplies fragments of the PTX ISA's layout") {
  require_product<__half>();
  require_product<__nv_bfloat16>();

  std::mt19937 random(5);
  Problem<int8_t, int32_t, 32> problem;
  for (int8_t& x : problem.a) x = static_cast<int8_t>(random());
  for (int8_t& x : problem.b) x = static_cast<int8_t>(random());
  for (int32_t& x : problem.c) x = static_cast<int32_t>(random() % 1000);
  const auto d = same_under_every_schedule([&] {
    std::vector<int32_t> out(16 * 8);
    launch(&multiply_8, {.block = {32}}, problem.a.data(), problem.b.data(), problem.c.data(), out.data());
    return out;
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      int32_t sum = problem.c[row * 8 + column];
      for (int k = 0; k < 32; ++k) sum += problem.a[row * 32 + k] * problem.b[k * 8 + column];
      REQUIRE(d[row * 8 + column] == sum);
    }
  }
}

namespace {

constexpr int kRowElements = 24;  // 16 bytes more than a row, as padding against bank conflicts

template <int kCount, bool kTransposed>
__global__ void load_matrices(const uint16_t* in, uint32_t* out, int offset) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  auto* elements = reinterpret_cast<uint16_t*>(memory);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 32 * kRowElements; i += 32) elements[i] = in[i];
  __syncwarp();
  uint32_t fragment[kCount];
  ldmatrix<kCount, kTransposed>(fragment, elements + lane * kRowElements + offset);
  for (int i = 0; i < kCount; ++i) out[i * 32 + lane] = fragment[i];
}

template <int kCount, bool kTransposed>
void require_matrices(const std::vector<uint16_t>& in) {
  CAPTURE(kCount, kTransposed);
  const auto fragments = same_under_every_schedule([&] {
    std::vector<uint32_t> out(kCount * 32);
    launch(&load_matrices<kCount, kTransposed>, {.block = {32}, .shared_bytes = in.size() * sizeof(uint16_t)},
           in.data(), out.data(), 0);
    return out;
  });
  for (int matrix = 0; matrix < kCount; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      for (int column = 0; column < 8; ++column) {
        const int line = kTransposed ? column : row;
        const int along = kTransposed ? row : column;
        const uint32_t fragment = fragments[matrix * 32 + line * 4 + along / 2];
        const uint32_t element = fragment >> 16 * (along % 2) & 0xffffU;
        REQUIRE(element == in[(8 * matrix + row) * kRowElements + column]);
      }
    }
  }
}

}  // namespace

TEST_CASE("ldmatrix spreads rows, or columns, over the lanes") {
  std::vector<uint16_t> in(32 * kRowElements);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i * 31 + 7);
  require_matrices<1, false>(in);
  require_matrices<2, false>(in);
  require_matrices<4, false>(in);
  require_matrices<1, true>(in);
  require_matrices<2, true>(in);
  require_matrices<4, true>(in);

  std::vector<uint32_t> out(4 * 32);
  const LaunchConfig config{.block = {32}, .shared_bytes = in.size() * sizeof(uint16_t)};
  REQUIRE_THROWS_WITH(launch(&load_matrices<4, false>, config, in.data(), out.data(), 4),
                      ContainsSubstring("aligned to 16; got offset"));
  REQUIRE_THROWS_WITH(launch(&load_matrices<4, false>, config, in.data(), out.data(), 31 * kRowElements),
                      ContainsSubstring("within the 1536 bytes of shared memory"));
}
