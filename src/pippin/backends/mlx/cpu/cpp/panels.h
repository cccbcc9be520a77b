// Products with weights that were packed once, y = x w^T. Knows no mlx.
//
//   x [rows, inputs]    w [panels][inputs][PANEL]: a panel is the weights of PANEL outputs, side by side
//
// OpenBLAS packs the weights anew for every product, which for the rows of a decode step or of a short
// chunk takes longer than the product. A tile is one panel's outputs of up to TALL rows, kept in
// registers; every sum runs over the inputs in order, so that a row's outputs do not depend on the rows
// beside it. Weights may lie in 16 bits: few rows take as long as it takes to read them.
#pragma once

#include <utility>

#include "numbers.h"

#if defined(__AVX512F__)
constexpr int TALL = 14, BROAD = 2;  // 32 registers: 28 of sums, 2 of weights, 1 of a row
#elif defined(__AVX__)
constexpr int TALL = 6, BROAD = 2;   // 16 registers
#else
constexpr int TALL = 6, BROAD = 4;   // NEON has 32
#endif
constexpr int PANEL = BROAD * LANES;
constexpr long AHEAD = 32;    // inputs whose weights are on their way: few rows wait for nothing else
constexpr long DEPTH = 1024;  // inputs at a time: what a tile reads of a panel stays near the core

struct Product {
  long rows, outputs, inputs;
  const float* x;
  float* y;
};

// A panel's weights: those of one input, and how far the next one's are.
template <typename Number>
struct Panel {
  long number;
  const Number* weights;
  long step = PANEL;
};

// Inputs [from, to) of rows [row, row + ROWS), onto what came of those before.
template <typename Number, int ROWS>
void tile(const Product& p, const Panel<Number>& panel, long row, long from, long to) {
  const float* x = p.x + row * p.inputs;
  const int columns = std::min<long>(PANEL, p.outputs - panel.number * PANEL);
  float* y = p.y + row * p.outputs + panel.number * PANEL;
  alignas(BYTES) float edge[ROWS * PANEL];
  const bool whole = columns == PANEL;
  float* out = whole ? y : edge;
  const long step = whole ? p.outputs : PANEL;
  if (!whole && from) {
    for (int r = 0; r < ROWS; r++) std::copy(y + r * p.outputs, y + r * p.outputs + columns, edge + r * PANEL);
  }
  Vector sums[ROWS][BROAD];  // in registers, as long as no loop over them is left a loop
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    for (int b = 0; b < BROAD; b++) sums[r][b] = from ? load(out + r * step + b * LANES) : Vector{};
  }
  for (long i = from; i < to; i++) {
    __builtin_prefetch(panel.weights + (i + AHEAD) * panel.step);
    Vector weights[BROAD];
    for (int b = 0; b < BROAD; b++) weights[b] = load(panel.weights + i * panel.step + b * LANES);
    for (int r = 0; r < ROWS; r++) {
      for (int b = 0; b < BROAD; b++) sums[r][b] += weights[b] * x[r * p.inputs + i];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    for (int b = 0; b < BROAD; b++) store(out + r * step + b * LANES, sums[r][b]);
  }
  if (!whole) {
    for (int r = 0; r < ROWS; r++) std::copy(edge + r * PANEL, edge + r * PANEL + columns, y + r * p.outputs);
  }
}

template <typename Number, int... I>
struct Tiles {
  using Tile = void (*)(const Product&, const Panel<Number>&, long, long, long);
  static constexpr Tile of[] = {tile<Number, I + 1>...};
};

template <typename Number, int... I>
Tiles<Number, I...> tiles_of(std::integer_sequence<int, I...>);

template <typename Number>
void multiply(const Product& p, const Panel<Number>& panel) {
  using All = decltype(tiles_of<Number>(std::make_integer_sequence<int, TALL>()));
  for (long from = 0; from < p.inputs; from += DEPTH) {
    const long to = std::min(from + DEPTH, p.inputs);
    for (long row = 0, left = (p.rows + TALL - 1) / TALL; left; left--) {
      const int tall = (p.rows - row + left - 1) / left;
      All::of[tall - 1](p, panel, row, from, to);
      row += tall;
    }
  }
}

// To all rows of a panel's outputs.
inline void add_bias(const Product& p, const float* bias, long number) {
  const long from = number * PANEL, to = std::min(from + PANEL, p.outputs);
  for (long row = 0; row < p.rows; row++) {
    for (long i = from; i < to; i++) p.y[row * p.outputs + i] += bias[i];
  }
}
