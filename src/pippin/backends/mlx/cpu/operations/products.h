// Products of matrices that lie row after row, by whomever libmlx asks for its own. Knows no mlx.
#pragma once

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                       float*, int);

constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;

inline const Sgemm* sgemm = nullptr;  // the slot through which libmlx calls it: it may be redirected

// c [m, n] = a [m, k] b [k, n]
inline void multiply(const float* a, const float* b, float* c, int m, int n, int k) {
  (*sgemm)(ROW_MAJOR, AS_IT_IS, AS_IT_IS, m, n, k, 1, a, k, b, n, 0, c, n);
}

// c [m, n] = a [m, k] b^T, b [n, k]
inline void multiply_transposed(const float* a, const float* b, float* c, int m, int n, int k) {
  (*sgemm)(ROW_MAJOR, AS_IT_IS, TRANSPOSED, m, n, k, 1, a, k, b, k, 0, c, n);
}
