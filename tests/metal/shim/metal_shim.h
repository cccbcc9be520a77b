// The part of Metal's standard library that custom kernels of mlx use, for clang on a CPU.
//
// Address spaces are not distinguished: compiled_kernel.py removes their names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../machine/machine.h"
#include "small_floats.h"

using std::size_t;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using float16_t = half;
using bfloat16_t = bfloat;
#define VECTORS(type)                                            \
  typedef type type##2 __attribute__((ext_vector_type(2)));      \
  typedef type type##3 __attribute__((ext_vector_type(3)));      \
  typedef type type##4 __attribute__((ext_vector_type(4)));
VECTORS(float)
VECTORS(int)
VECTORS(uint)
VECTORS(ushort)
VECTORS(uchar)
#undef VECTORS
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace metal {

using std::conditional_t;
using std::enable_if_t;
using std::is_floating_point_v;
using std::is_same_v;

template <typename T> struct Result { using type = float; };
template <> struct Result<half> { using type = half; };
template <> struct Result<bfloat> { using type = bfloat; };
template <typename T> using result_t = typename Result<T>::type;

#define FUNCTION(name)                                                             \
  template <typename T> QUIET result_t<T> name(T x) {                              \
    return result_t<T>(__builtin_##name##f(float(x)));                             \
  }
#define FUNCTIONS                                                                          \
  FUNCTION(exp) FUNCTION(exp2) FUNCTION(log) FUNCTION(log2) FUNCTION(log10) \
  FUNCTION(sin) FUNCTION(cos) FUNCTION(tan) FUNCTION(tanh) FUNCTION(sinh) FUNCTION(cosh)   \
  FUNCTION(asin) FUNCTION(acos) FUNCTION(atan) FUNCTION(sqrt)                               \
  FUNCTION(floor) FUNCTION(ceil) FUNCTION(rint) FUNCTION(round) FUNCTION(trunc)             \
  template <typename T> QUIET result_t<T> rsqrt(T x) {                                      \
    return result_t<T>(1.0f / __builtin_sqrtf(float(x)));                                   \
  }                                                                                         \
  template <typename T, typename U> QUIET result_t<T> pow(T x, U y) {                       \
    return result_t<T>(__builtin_powf(float(x), float(y)));                                 \
  }
FUNCTIONS
namespace precise { FUNCTIONS }
namespace fast { FUNCTIONS }
#undef FUNCTION
#undef FUNCTIONS

template <typename T, typename U> using Common = decltype(std::declval<T>() + std::declval<U>());
template <typename T, typename U> QUIET Common<T, U> max(T a, U b) { return Common<T, U>(a) < Common<T, U>(b) ? Common<T, U>(b) : Common<T, U>(a); }
template <typename T, typename U> QUIET Common<T, U> min(T a, U b) { return Common<T, U>(b) < Common<T, U>(a) ? Common<T, U>(b) : Common<T, U>(a); }
template <typename T> QUIET T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T> QUIET T abs(T x) { return x < T(0) ? T(-x) : x; }
template <typename T> QUIET T fabs(T x) { return abs(x); }
template <typename T> QUIET T select(T no, T yes, bool chosen) { return chosen ? yes : no; }
template <typename T> QUIET bool isnan(T x) { return __builtin_isnan(float(x)); }
template <typename T> QUIET bool isinf(T x) { return __builtin_isinf(float(x)); }
template <typename T> QUIET bool isfinite(T x) { return __builtin_isfinite(float(x)); }
QUIET inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <typename To, typename From> QUIET To as_type(From x) { return __builtin_bit_cast(To, x); }
QUIET inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
template <typename T> QUIET T popcount(T x) { return __builtin_popcount(x); }

}  // namespace metal

#include "simd.h"

using namespace metal;
