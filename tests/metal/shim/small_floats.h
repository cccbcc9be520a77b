// half and bfloat in software: each operation is done in float and rounded, ties to even.
#pragma once
#include <type_traits>

// Not checked itself, so not inlined into what is.
#define QUIET __attribute__((no_sanitize("thread", "undefined"), noinline))

struct HalfBits {
  static uint16_t round(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size < 0x38800000)  // below the least normal number: adding 0.5 leaves the right bits
      return sign | (__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 0.5f) -
                     0x3f000000);
    return sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
  }
  static float widen(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, rest = bits & 0x3ff;
    if (exponent == 0) {
      const float value = rest * 0x1p-24f;
      return sign ? -value : value;
    }
    const uint32_t wide = exponent == 31 ? 0x7f800000 : (exponent + 112) << 23;
    return __builtin_bit_cast(float, sign | wide | rest << 13);
  }
};

struct BfloatBits {
  static uint16_t round(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float widen(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

template <typename Bits>
struct SmallFloat {
  uint16_t bits;

  SmallFloat() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  constexpr SmallFloat(T value) : bits(Bits::round(static_cast<float>(value))) {}
  template <typename Other>
  explicit SmallFloat(SmallFloat<Other> value) : SmallFloat(static_cast<float>(value)) {}
  operator float() const { return Bits::widen(bits); }
  SmallFloat operator-() const { return -float(*this); }
};

// With an integer or one of its kind the result is as small; with float it is float.
template <typename Bits, typename T>
using Mixed = std::conditional_t<std::is_floating_point_v<T>, T, SmallFloat<Bits>>;
#define SMALL_FLOAT_OPERATOR(op)                                                            \
  template <typename B>                                                                     \
  SmallFloat<B> operator op(SmallFloat<B> a, SmallFloat<B> b) {                             \
    return float(a) op float(b);                                                            \
  }                                                                                         \
  template <typename B, typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>   \
  Mixed<B, T> operator op(SmallFloat<B> a, T b) {                                           \
    return float(a) op float(b);                                                            \
  }                                                                                         \
  template <typename B, typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>   \
  Mixed<B, T> operator op(T a, SmallFloat<B> b) {                                           \
    return float(a) op float(b);                                                            \
  }                                                                                         \
  template <typename B, typename T>                                                         \
  SmallFloat<B>& operator op##=(SmallFloat<B>& a, T b) {                                    \
    return a = SmallFloat<B>(float(a) op float(b));                                         \
  }
SMALL_FLOAT_OPERATOR(+)
SMALL_FLOAT_OPERATOR(-)
SMALL_FLOAT_OPERATOR(*)
SMALL_FLOAT_OPERATOR(/)
#undef SMALL_FLOAT_OPERATOR

using half = SmallFloat<HalfBits>;
using bfloat = SmallFloat<BfloatBits>;
