// The conversions, exhaustively over 16-bit numbers and around every rounding boundary, and the exponential.
#include <catch2/catch_test_macros.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "drive.h"
#include "elements.h"
#include "simd_subject.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Subject {
  std::string target;
  const SimdSubject* simd;
};

std::vector<Subject> subjects() {
  std::vector<Subject> found;
  for (const KernelTable* kernels : targets()) {
    const std::string name = kernels->target;
    if (name == "scalar") found.push_back({name, &scalar::kSimdSubject});
#if defined(__x86_64__)
    if (name == "avx2") found.push_back({name, &avx2::kSimdSubject});
    if (name == "avx512") found.push_back({name, &avx512::kSimdSubject});
    if (name == "avx512vnni") found.push_back({name, &avx512vnni::kSimdSubject});
    if (name == "avx512bf16") found.push_back({name, &avx512bf16::kSimdSubject});
#endif
  }
  return found;
}

std::vector<uint16_t> all_bits() {
  std::vector<uint16_t> bits(1 << 16);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  return bits;
}

bool same_number(float x, double expected) {
  if (std::isnan(expected)) return std::isnan(x);
  return x == expected && std::signbit(x) == std::signbit(expected);
}

using FromFloat = uint16_t (*)(float);

void require_rounds(FromFloat from_float, const SmallFloat& format, float x) {
  const uint16_t actual = from_float(x);
  const bool right = std::isnan(x) ? std::isnan(format.decode(actual)) && (actual >> 15) == std::signbit(x)
                                   : actual == format.encode(x);
  if (!right) FAIL("bits " << std::bit_cast<uint32_t>(x) << " (" << x << ") became " << actual);
}

// Every number of the format, the midpoint to its neighbour, and the floats on both sides of either.
void require_rounds_to_nearest_even(FromFloat from_float, const SmallFloat& format) {
  for (const uint16_t bits : all_bits()) {
    const auto x = static_cast<float>(format.decode(bits));
    require_rounds(from_float, format, x);
    if (!std::isfinite(x)) continue;
    if (from_float(x) != bits) FAIL("round trip of " << bits);
    // The neighbour of the largest number is where the next binade would begin.
    const uint16_t next_bits = static_cast<uint16_t>(bits + 1);
    const int largest_exponent = (format.infinity() >> format.mantissa_bits) - 2 + format.min_exponent;
    const double next = (next_bits & 0x7fff) == format.infinity()
                            ? std::copysign(std::ldexp(1.0, largest_exponent + 1), x)
                            : format.decode(next_bits);
    const auto middle = static_cast<float>((x + next) / 2.0);
    for (const float near : {x, middle}) {
      require_rounds(from_float, format, near);
      require_rounds(from_float, format, std::nextafter(near, kInf));
      require_rounds(from_float, format, std::nextafter(near, -kInf));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 300'000; ++i) {
    require_rounds(from_float, format, std::bit_cast<float>(static_cast<uint32_t>(random())));
  }
}

}  // namespace

TEST_CASE("Every 16-bit number widens exactly, one at a time and eight at a time") {
  const std::vector<uint16_t> bits = all_bits();
  std::vector<float> halves(bits.size());
  std::vector<float> bfloat16s(bits.size());
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    simd->load_halves(bits.data(), halves.data(), static_cast<int64_t>(bits.size()));
    simd->load_bfloat16s(bits.data(), bfloat16s.data(), static_cast<int64_t>(bits.size()));
    for (size_t i = 0; i < bits.size(); ++i) {
      const double half = kHalf.decode(bits[i]);
      const double bfloat16 = kBFloat16.decode(bits[i]);
      if (!same_number(simd->half_to_float(bits[i]), half)) FAIL("scalar half " << i);
      if (!same_number(halves[i], half)) FAIL("vector half " << i);
      if (!same_number(simd->bfloat16_to_float(bits[i]), bfloat16)) FAIL("scalar bfloat16 " << i);
      if (!same_number(bfloat16s[i], bfloat16)) FAIL("vector bfloat16 " << i);
    }
  }
}

TEST_CASE("Narrowing to half rounds to nearest, ties to even, around every half") {
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    require_rounds_to_nearest_even(simd->half_from_float, kHalf);
    REQUIRE(simd->half_from_float(65519.996F) == 0x7bff);
    REQUIRE(simd->half_from_float(65520.0F) == 0x7c00);
    REQUIRE(simd->half_from_float(-0x1p-25F) == 0x8000);
    REQUIRE(simd->half_from_float(std::nextafter(0x1p-25F, 1.0F)) == 0x0001);
  }
}

TEST_CASE("Narrowing to bfloat16 rounds to nearest, ties to even, around every bfloat16") {
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    require_rounds_to_nearest_even(simd->bfloat16_from_float, kBFloat16);
    REQUIRE(simd->bfloat16_from_float(std::numeric_limits<float>::max()) == 0x7f80);
    // A NaN whose payload lies in the bits that are cut off.
    REQUIRE(std::isnan(kBFloat16.decode(simd->bfloat16_from_float(std::bit_cast<float>(0x7f800001U)))));
  }
}

TEST_CASE("Bytes widen with their sign, and a short load reads no further than asked") {
  std::vector<int8_t> bytes(256);
  std::iota(bytes.begin(), bytes.end(), static_cast<int8_t>(-128));
  std::vector<float> wide(256);
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    simd->load_bytes(bytes.data(), wide.data(), 256);
    for (int i = 0; i < 256; ++i) REQUIRE(wide[i] == static_cast<float>(i - 128));
    for (int64_t n = 0; n < 8; ++n) {
      const std::vector<uint16_t> ones(static_cast<size_t>(n), 0x3c00);  // ends where the allocation does
      float lanes[8];
      simd->load_first_halves(ones.data(), lanes, n);
      for (int64_t i = 0; i < 8; ++i) REQUIRE(lanes[i] == (i < n ? 1.0F : 0.0F));
    }
  }
}

TEST_CASE("The exponential of [-87, 0] has a relative error below 2e-6") {
  std::vector<float> x;
  const uint32_t end = std::bit_cast<uint32_t>(-87.0F);
  for (uint32_t bits = std::bit_cast<uint32_t>(-1e-9F); bits <= end; bits += 997)
    x.push_back(std::bit_cast<float>(bits));
  for (int n = 0; n <= 125; ++n) {  // around the boundaries of the range reduction
    const auto boundary = static_cast<float>(-(n + 0.5) * std::log(2.0));
    if (boundary >= -87.0F)
      x.insert(x.end(), {std::nextafter(boundary, 0.0F), boundary, std::nextafter(boundary, -kInf)});
  }
  x.insert(x.end(), {0.0F, -0.0F, -87.0F, std::nextafter(-87.0F, 0.0F)});
  x.resize((x.size() + 7) / 8 * 8, -1.0F);
  std::vector<float> y(x.size());
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    simd->exp_nonpositive(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      worst = std::max(worst, std::fabs(y[i] - exact) / exact);
    }
    REQUIRE(worst < 2e-6);
    REQUIRE(simd->exp_nonpositive_scalar(0.0F) == 1.0F);
    REQUIRE(simd->exp_nonpositive_scalar(-0.0F) == 1.0F);
    REQUIRE(simd->exp_nonpositive_scalar(x[12345]) == y[12345]);
  }
}

TEST_CASE("The exponential is 0 far below and NaN for NaN") {
  for (const auto& [target, simd] : subjects()) {
    CAPTURE(target);
    for (const float x : {std::nextafter(-87.0F, -kInf), -88.0F, -1e4F, -3e38F, -kInf}) {
      REQUIRE(simd->exp_nonpositive_scalar(x) == 0.0F);
    }
    REQUIRE(std::isnan(simd->exp_nonpositive_scalar(static_cast<float>(kNan))));
    REQUIRE(std::isnan(simd->exp_nonpositive_scalar(-static_cast<float>(kNan))));
    // One bad lane does not touch the others.
    const float mixed[8] = {-1.0F, static_cast<float>(kNan), -kInf, 0.0F, -2.0F, -100.0F, -0.5F, -86.0F};
    float y[8];
    simd->exp_nonpositive(mixed, y, 8);
    for (int i = 0; i < 8; ++i) {
      const float alone = simd->exp_nonpositive_scalar(mixed[i]);
      REQUIRE((y[i] == alone || (std::isnan(y[i]) && i == 1)));
    }
  }
}

TEST_CASE("The sum of lanes counts every lane once") {
  const float lanes[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  for (const auto& [target, simd] : subjects()) REQUIRE(simd->horizontal_sum(lanes) == 255.0F);
}
