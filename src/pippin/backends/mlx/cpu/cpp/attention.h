// Attention of a chunk's queries over keys of one key head. Knows no mlx.
//
// Some queries at a time, of all heads that share the keys: their scores stay near the core. Weights are
// divided by their sum when they have met the values.
#pragma once

#include <numeric>
#include <vector>

#include "panels.h"

constexpr long MOST_SCORES = 1 << 18;
constexpr int FEWEST_QUERIES = 8, MOST_QUERIES = 32;

// Scores to weights, in place, by how far each is below the `top` one; returns their sum.
inline float weigh(float* scores, long count, float top) {
  Vector sums = {};
  long i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vector weights = exp_nonpositive(load(scores + i) - top);
    store(scores + i, weights);
    sums += weights;
  }
  float total = sum_lanes(sums), edge[LANES] = {};
  std::copy(scores + i, scores + count, edge);
  store(edge, exp_nonpositive(load(edge) - top));
  std::copy(edge, edge + count - i, scores + i);
  return std::accumulate(edge, edge + count - i, total);
}

// Keys and values of one row and key head, one after the other.
struct Keys {
  long count;
  int dim, value_dim;
  const float *keys, *values;

  Keys behind(long tokens) const {
    return {count - tokens, dim, value_dim, keys + tokens * dim, values + tokens * value_dim};
  }
};

inline long total(const std::vector<Keys>& pieces) {
  long count = 0;
  for (const Keys& piece : pieces) count += piece.count;
  return count;
}

// Up to PANEL keys from the `first` on, turned around; where there are fewer, zeros.
inline void pack(const Keys& keys, long first, int count, float* panel) {
  for (int i = 0; i < keys.dim; i++) {
    for (int c = 0; c < PANEL; c++) panel[i * PANEL + c] = c < count ? keys.keys[(first + c) * keys.dim + i] : 0.0f;
  }
}

// Every query by each of the first `most` keys.
inline void score(const Keys& keys, long most, const float* queries, long rows, float* scores) {
  const Product product{rows, most, keys.dim, queries, scores};
  const auto panel = scratch(long(keys.dim) * PANEL);
  for (long number = 0; number * PANEL < most; number++) {
    pack(keys, number * PANEL, std::min<long>(PANEL, most - number * PANEL), panel.get());
    multiply<float>(product, {number, panel.get()});
  }
}

// The sum of the first `most` values, by weight.
inline void blend(const Keys& keys, long most, const float* weights, long rows, float* sums) {
  const Product product{rows, keys.value_dim, most, weights, sums};
  const int whole = keys.value_dim / PANEL, left = keys.value_dim % PANEL;
  for (int number = 0; number < whole; number++) {
    multiply<float>(product, {number, keys.values + number * PANEL, keys.value_dim});
  }
  if (!left) return;
  const auto edge = scratch(most * PANEL);
  for (long i = 0; i < most; i++) {
    const float* from = keys.values + i * keys.value_dim + whole * PANEL;
    std::fill(std::copy(from, from + left, edge.get() + i * PANEL), edge.get() + (i + 1) * PANEL, 0.0f);
  }
  multiply<float>(product, {whole, edge.get()});
}

// For queries [start, stop) of the chunk. `query(head, at)` and `out(head, at)` are where their numbers
// lie, `seen(at)` how many keys a query may look at from the first on, `allowed(at)` null or what it may
// see of them.
template <typename Query, typename Seen, typename Allowed, typename Out>
void attend(const Keys& keys, int heads, int start, int stop, float scale, const Query& query,
            const Seen& seen, const Allowed& allowed, const Out& out) {
  const int num = stop - start, rows = heads * num, dim = keys.dim, value_dim = keys.value_dim;
  const long most = seen(stop - 1);
  const auto scaled = scratch(long(rows) * dim), scores = scratch(rows * most);
  const auto read = scratch(long(rows) * value_dim), totals = scratch(rows);
  for (int row = 0; row < rows; row++) {
    const float* q = query(row / num, start + row % num);
    for (int i = 0; i < dim; i++) scaled[long(row) * dim + i] = q[i] * scale;
  }
  score(keys, most, scaled.get(), rows, scores.get());
  for (int row = 0; row < rows; row++) {
    const int at = start + row % num;
    float* own = scores.get() + row * most;
    const long count = seen(at);
    if (const char* may = allowed(at)) {
      for (long i = 0; i < count; i++) own[i] = may[i] ? own[i] : -1e30f;
    }
    totals[row] = weigh(own, count, largest(own, count));
    std::fill(own + count, own + most, 0.0f);
  }
  blend(keys, most, scores.get(), rows, read.get());
  for (int row = 0; row < rows; row++) {
    float* to = out(row / num, start + row % num);
    for (int i = 0; i < value_dim; i++) to[i] = read[long(row) * value_dim + i] / totals[row];
  }
}

inline int queries_at_once(int heads, long num_keys) {
  return std::clamp<long>(MOST_SCORES / (heads * num_keys), FEWEST_QUERIES, MOST_QUERIES);
}

// What a query has read of some of its keys: the highest score, the sum of weights below it, and the
// values by these weights.
struct Read {
  float top = -INFINITY, total = 0;
  float* values = nullptr;
};

// Queries that share the keys, over all pieces. `seen(query)`: which of the keys, in the pieces' order, it may
// look at: [first, end).
template <typename Seen>
void attend_pieces(const std::vector<Keys>& pieces, const float* queries, int num, int dim, int value_dim,
                   float scale, const Seen& seen, Read* reads) {
  const long count = total(pieces);
  const auto weights = scratch(num * count);
  long at = 0;
  for (const Keys& piece : pieces) {
    for (long i = 0; i < piece.count; i++, at++) {
      for (int query = 0; query < num; query++) {
        weights[query * count + at] = scale * dot(queries + query * dim, piece.keys + i * dim, dim);
      }
    }
  }
  for (int query = 0; query < num; query++) {
    std::fill(reads[query].values, reads[query].values + value_dim, 0.0f);
    const auto [first, end] = seen(query);
    float* own = weights.get() + query * count;
    if (first < end) {
      reads[query].top = largest(own + first, end - first);
      reads[query].total = weigh(own + first, end - first, reads[query].top);
    }
    std::fill(own, own + first, 0.0f);
    std::fill(own + end, own + count, 0.0f);
  }
  at = 0;
  for (const Keys& piece : pieces) {
    for (long i = 0; i < piece.count; i++, at++) {
      const float* value = piece.values + i * value_dim;
      for (int query = 0; query < num; query++) {
        const float weight = weights[query * count + at];
        float* to = reads[query].values;
        for (int c = 0; c < value_dim; c++) to[c] += weight * value[c];
      }
    }
  }
}

// Queries [rows, dim], scaled, over keys that all of them see. The values that are read lie one after the other.
inline void attend_together(const Keys& keys, const float* queries, long rows, Read* reads) {
  const long count = keys.count;
  const auto weights = scratch(rows * count);
  score(keys, count, queries, rows, weights.get());
  for (long row = 0; row < rows; row++) {
    float* own = weights.get() + row * count;
    reads[row].top = largest(own, count);
    reads[row].total = weigh(own, count, reads[row].top);
  }
  blend(keys, count, weights.get(), rows, reads[0].values);
}

// What was read of all keys. A `sink` has a weight and no value; a query that sees no key gets zeros.
inline void put_together(const std::vector<Read>& reads, float sink, int value_dim, float* out) {
  float top = sink, total = 0;
  for (const Read& read : reads) top = std::max(top, read.top);
  std::fill(out, out + value_dim, 0.0f);
  if (top == -INFINITY) return;
  for (const Read& read : reads) {
    const float weight = std::exp(read.top - top);
    total += weight * read.total;
    for (int c = 0; c < value_dim; c++) out[c] += weight * read.values[c];
  }
  total += std::exp(sink - top);
  for (int c = 0; c < value_dim; c++) out[c] /= total;
}
