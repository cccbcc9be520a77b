// Products of few rows, y = x w^T, that read the weights once and as they lie. Knows no mlx.
//
//   x [rows, inputs]       a handful of rows, which stay in the cache
//   w [outputs, inputs]    megabytes, of which each number is needed once
//
// A tile is 4 outputs of up to TALL rows, kept in registers as vectors of partial sums over the inputs.
// What a row's outputs are does not depend on the rows beside it: their sums are added up in one order.

#include <algorithm>
#include <atomic>

#include "operations/pool.h"

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, TALL = 6;  // 32 registers: 24 of sums, 6 of rows, 1 of weights
#elif defined(__AVX__)
constexpr int BYTES = 32, TALL = 3;  // 16 registers
#else
constexpr int BYTES = 16, TALL = 6;  // NEON has 32
#endif
constexpr int LANES = BYTES / sizeof(float), WIDE = 4;

typedef float Vector __attribute__((vector_size(BYTES)));
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int Lanes __attribute__((vector_size(BYTES)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }

// Vectors of groups of partial sums: each group of a, then of b, becomes one of half its size.
template <int GROUP>
inline Vector fold(Vector a, Vector b) {
  constexpr int HALF = GROUP / 2;
  Lanes low, high;
  for (int i = 0; i < LANES; i++) {
    low[i] = i / HALF * GROUP + i % HALF;
    high[i] = low[i] + HALF;
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

template <int GROUP>
inline Vector fold_to_ones(Vector sums) {
  if constexpr (GROUP == 1) {
    return sums;
  } else {
    return fold_to_ones<GROUP / 2>(fold<GROUP>(sums, sums));
  }
}

// The sum of each of four vectors, in the first four lanes.
inline Vector add_up(const Vector (&of)[WIDE]) {
  Vector pairs = fold<LANES / 2>(fold<LANES>(of[0], of[1]), fold<LANES>(of[2], of[3]));
  return fold_to_ones<LANES / 4>(pairs);
}

struct Product {
  long rows, outputs, inputs;
  const float* x;
  long x_stride;
  const float* w;
  long w_stride;
  float* y;
  long y_stride;
};

template <int TALL_, bool FETCHES_NEXT>
void tile(const Product& p, long row, long output) {
  const float* x = p.x + row * p.x_stride;
  const float* w = p.w + output * p.w_stride;
  Vector sums[TALL_][WIDE] = {};
  long at = 0;
  for (; at + LANES <= p.inputs; at += LANES) {
    Vector rows[TALL_];
    for (int t = 0; t < TALL_; t++) rows[t] = load(x + t * p.x_stride + at);
    for (int c = 0; c < WIDE; c++) {
      Vector weights = load(w + c * p.w_stride + at);
      if (FETCHES_NEXT) __builtin_prefetch(w + (WIDE + c) * p.w_stride + at);
      for (int t = 0; t < TALL_; t++) sums[t][c] += weights * rows[t];
    }
  }
  for (int t = 0; t < TALL_; t++) {
    Vector totals = add_up(sums[t]);
    for (int c = 0; c < WIDE; c++) {
      float total = totals[c];
      for (long i = at; i < p.inputs; i++) {
        total += x[t * p.x_stride + i] * w[c * p.w_stride + i];
      }
      p.y[(row + t) * p.y_stride + output + c] = total;
    }
  }
}

template <bool FETCHES_NEXT>
void tile_of(int tall, const Product& p, long row, long output) {
  switch (tall) {
    case 1: return tile<1, FETCHES_NEXT>(p, row, output);
    case 2: return tile<2, FETCHES_NEXT>(p, row, output);
    case 3: return tile<3, FETCHES_NEXT>(p, row, output);
    case 4: return tile<std::min(4, TALL), FETCHES_NEXT>(p, row, output);
    case 5: return tile<std::min(5, TALL), FETCHES_NEXT>(p, row, output);
    default: return tile<TALL, FETCHES_NEXT>(p, row, output);
  }
}

// Outputs [from, to), both multiples of WIDE. The last tile of each four asks for the next weights.
void strip(const Product& p, long from, long to) {
  const long tiles = (p.rows + TALL - 1) / TALL;
  for (long output = from; output < to; output += WIDE) {
    long row = 0;
    for (long left = tiles; left > 1; left--) {
      const int tall = (p.rows - row + left - 1) / left;
      tile_of<false>(tall, p, row, output);
      row += tall;
    }
    tile_of<true>(p.rows - row, p, row, output);
  }
}

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                       float*, int);

constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112;
constexpr long FEWEST_INPUTS = 128;        // below, sums take longer to add up than to make
constexpr long FEWEST_WEIGHTS = 1 << 17;   // smaller ones lie in the cache, and OpenBLAS is as fast
constexpr long BLOCK_WEIGHTS = 1 << 14;    // that one thread takes at a time

Sgemm other = nullptr;
std::atomic<int> most_rows{0};

bool is_ours(int m, int n, int k) {
  return 0 < m && m <= most_rows && n % WIDE == 0 && k >= FEWEST_INPUTS && long(n) * k >= FEWEST_WEIGHTS;
}

void multiply(const Product& p) {
  const long outputs = std::max(1L, BLOCK_WEIGHTS / p.inputs / WIDE) * WIDE;
  Pool::shared().run(p.outputs, outputs, [&](long from, long to) { strip(p, from, to); });
}

}  // namespace

extern "C" {

// `sgemm` gets all products that are not ours. Once per process.
void few_rows_start(Sgemm sgemm, int threads) {
  other = sgemm;
  Pool::start(threads);
}

// Products of up to so many rows are ours.
void few_rows_set(int rows) { most_rows = rows; }

void few_rows_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  if (order == ROW_MAJOR && transpose_a == AS_IT_IS && transpose_b == TRANSPOSED && alpha == 1 &&
      beta == 0 && is_ours(m, n, k)) {
    multiply({m, n, k, a, lda, b, ldb, c, ldc});
  } else {
    other(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
}
}
