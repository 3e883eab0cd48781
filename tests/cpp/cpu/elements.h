// Tensor storage of the kernel tests and their own conversions between element types, written from the
// definition of the formats in double precision. Memory nobody has set reads as NaN in every floating-point
// type, and as -1 in int8, whose scales then are NaN (paged_problem.h).
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/element_type.h"

namespace tinyserve::cpu::testing {

using core::ElementType;

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr ElementType kElementTypes[] = {ElementType::kFloat32, ElementType::kFloat16,
                                                ElementType::kBFloat16};
inline constexpr ElementType kPageTypes[] = {ElementType::kFloat32, ElementType::kFloat16,
                                             ElementType::kBFloat16, ElementType::kInt8};

// A binary floating-point format of 16 bits.
struct SmallFloat {
  int mantissa_bits;
  int min_exponent;  // of the normal numbers

  uint16_t infinity() const { return static_cast<uint16_t>(0x7fff >> mantissa_bits << mantissa_bits); }

  double decode(uint16_t bits) const {
    const int magnitude = bits & 0x7fff;
    const int exponent = magnitude >> mantissa_bits;
    const int fraction = magnitude & ((1 << mantissa_bits) - 1);
    const int quantum = min_exponent - mantissa_bits;
    double x;
    if (magnitude >= infinity()) {
      x = fraction == 0 ? kInfinity : kNan;
    } else if (exponent == 0) {
      x = std::ldexp(fraction, quantum);
    } else {
      x = std::ldexp(fraction + (1 << mantissa_bits), quantum + exponent - 1);
    }
    return (bits & 0x8000) != 0 ? -x : x;
  }

  // To the nearest, ties to even: what nearbyint does to a multiple of the last place.
  uint16_t encode(double x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double a = std::fabs(x);
    if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity() | 1 << (mantissa_bits - 1));
    if (std::isinf(x)) return static_cast<uint16_t>(sign | infinity());
    const int exponent = a == 0.0 ? min_exponent : std::max(std::ilogb(a), min_exponent);
    const auto last_places = static_cast<int64_t>(std::nearbyint(std::ldexp(a, mantissa_bits - exponent)));
    // A rounding that carries into the next binade lands on its first number by itself.
    const int64_t bits = (static_cast<int64_t>(exponent - min_exponent) << mantissa_bits) + last_places;
    return static_cast<uint16_t>(sign | std::min<int64_t>(bits, infinity()));
  }
};

inline constexpr SmallFloat kHalf{.mantissa_bits = 10, .min_exponent = -14};
inline constexpr SmallFloat kBFloat16{.mantissa_bits = 7, .min_exponent = -126};

inline const SmallFloat& small_float(ElementType type) {
  return type == ElementType::kFloat16 ? kHalf : kBFloat16;
}

inline double rounded_to(ElementType type, double x) {
  if (type == ElementType::kFloat32) return static_cast<float>(x);
  return small_float(type).decode(small_float(type).encode(x));
}

// The relative error of rounding to a type once.
inline double unit_roundoff(ElementType type) {
  return type == ElementType::kFloat32 ? 0x1p-24 : std::ldexp(1.0, -small_float(type).mantissa_bits - 1);
}

class Elements {
 public:
  Elements() = default;
  Elements(ElementType type, int64_t count)
      : type_(type), bytes_(static_cast<size_t>(count * core::element_size(type)), 0xff) {}

  ElementType type() const { return type_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / core::element_size(type_); }
  uint8_t* data() { return bytes_.data(); }
  const uint8_t* data() const { return bytes_.data(); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  // int8 takes and gives the code itself.
  void set(int64_t i, double x) {
    if (type_ == ElementType::kInt8) {
      bytes_[i] = static_cast<uint8_t>(static_cast<int8_t>(x));
    } else if (type_ == ElementType::kFloat32) {
      const auto value = static_cast<float>(x);
      std::memcpy(&bytes_[4 * i], &value, 4);
    } else {
      const uint16_t bits = small_float(type_).encode(x);
      std::memcpy(&bytes_[2 * i], &bits, 2);
    }
  }
  double get(int64_t i) const {
    if (type_ == ElementType::kInt8) return static_cast<int8_t>(bytes_[i]);
    if (type_ == ElementType::kFloat32) {
      float value;
      std::memcpy(&value, &bytes_[4 * i], 4);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, &bytes_[2 * i], 2);
    return small_float(type_).decode(bits);
  }
  std::vector<double> values() const {
    std::vector<double> all(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) all[i] = get(i);
    return all;
  }

 private:
  ElementType type_ = ElementType::kFloat32;
  std::vector<uint8_t> bytes_;
};

template <typename T>
std::vector<double> as_doubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

// Infinities and NaN at the same places, everything else within absolute + relative * |expected|.
inline void require_close(std::span<const double> actual, std::span<const double> expected, double absolute,
                          double relative = 0.0) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double x = actual[i];
    const double y = expected[i];
    const bool close = std::isfinite(x) && std::isfinite(y)
                           ? std::fabs(x - y) <= absolute + relative * std::fabs(y)
                           : x == y || (std::isnan(x) && std::isnan(y));
    if (!close) {
      FAIL("at " << i << " of " << actual.size() << ": got " << x << ", expected " << y << " within "
                 << absolute + relative * std::fabs(y));
    }
  }
}

template <typename T>
void require_same_bits(const std::vector<T>& actual, const std::vector<T>& expected) {
  REQUIRE(actual.size() == expected.size());
  if (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(T)) == 0) return;
  size_t i = 0;
  while (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) ++i;
  FAIL("bits differ at " << i << " of " << actual.size() << ": got " << +actual[i] << ", expected "
                         << +expected[i]);
}

}  // namespace tinyserve::cpu::testing
