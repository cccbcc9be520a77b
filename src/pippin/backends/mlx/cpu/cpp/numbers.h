// Numbers of 16 bits, read as floats. Knows no mlx.
#pragma once

#include <bit>
#include <cstdint>

#include "vectors.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// A bfloat16 is the upper half of a float.
inline Vector load(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
  const Halves halves = *reinterpret_cast<const Halves*>(from);
  return std::bit_cast<Vector>(__builtin_convertvector(halves, Words) << 16);
}

inline Vector load(const Float16* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return std::bit_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__ARM_NEON)
  return std::bit_cast<Vector>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
#else
  Vector found;
  for (int lane = 0; lane < LANES; lane++) {
    const uint32_t bits = from[lane].bits, sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    // The exponent's bias is 112 less; what that makes of tiny numbers a product mends.
    const float size = std::bit_cast<float>(rest << 13) * 0x1p112f;
    const uint32_t special = rest >= 0x7c00 ? 0x7f800000 : 0;
    found[lane] = std::bit_cast<float>(std::bit_cast<uint32_t>(size) | sign | special);
  }
  return found;
#endif
}
