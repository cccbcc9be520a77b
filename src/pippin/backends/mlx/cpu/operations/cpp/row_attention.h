// Attention of decode rows, one token each, over their tails and what the KV table has of them.
#pragma once

#include <climits>

#include "attention.h"
#include "kv_table.h"
#include "pool.h"

// How a layer's rows attend: its place among the KV layers, and how far back it looks (0: to the first).
struct RowAttention {
  int place, window;
  float scale;
};

// The newest `window` tokens of a tail, as pieces of those that lie together. Returns how many there are.
inline long pieces_of_tail(const KeyPiece& tail, const char* written, long window, std::vector<KeyPiece>& pieces) {
  long seen = 0, end = tail.count;
  const auto add = [&](long from, long to) {
    if (from < to) {
      pieces.push_back({to - from, tail.keys + from * tail.key_step, tail.key_step,
                        tail.values + from * tail.value_step, tail.value_step});
    }
  };
  for (long i = tail.count - 1; i >= 0; i--) {
    if (written[i] && seen < window) {
      seen++;
    } else {
      add(i + 1, end);
      end = i;
    }
  }
  add(0, end);
  return seen;
}

// One column of the tails of rows, where they lie. mlx writes in place only what has one holder, and with
// two steps in flight it would copy all of a tail. A holder of an older version reads other columns: each
// is written once, and tails that are begun anew have memory of their own (rows/arrays.py).
//
// in: keys and values [width, heads, tokens, dim]; those of the column [width, heads, 1, dim]; its number (int32).
inline void run_tail_write(const Inputs& in, const Outputs& out) {
  std::vector<float> room;
  for (int side = 0; side < 2; side++) {
    const View &tail = in[side], &column = in[2 + side];
    const float* before = tail.all(room);
    if (out[side] != before) std::copy(before, before + tail.size(), out[side]);
    const long tokens = tail.dim(2), dim = tail.dim(3), at = std::clamp<long>(*in[4].data<int>(), 0, tokens - 1);
    for (long line = 0; line < column.lines(); line++) {
      const float* from = column.line(line, room);
      std::copy(from, from + dim, out[side] + (line * tokens + at) * dim);
    }
  }
}

// in: queries [width, heads, 1, dim]; the tail's keys and values; which of its tokens are a row's own
// [width, tokens]; a KV table; maybe sinks [heads].
inline void run_row_attention(const Inputs& in, const Outputs& out, const RowAttention& how) {
  std::vector<float> rooms[3], sink_room;
  std::vector<char> written_room;
  const float *queries = in[0].all(rooms[0]), *keys = in[1].all(rooms[1]), *values = in[2].all(rooms[2]);
  const char* written = in[3].all(written_room);
  const KVTable& kv_table = **in[4].data<const KVTable*>();
  const float* sinks = in.size() > 5 ? in[5].all(sink_room) : nullptr;
  const int width = in[0].dim(0), groups = in[1].dim(1), shared = in[0].dim(1) / groups;
  const int dim = in[0].dim(3), value_dim = in[2].dim(3);
  const long tail = in[1].dim(2), window = how.window ? how.window : LONG_MAX;
  static const std::vector<CohortKV> NONE;
  const auto& cohorts = kv_table.layers.empty() ? NONE : kv_table.layers[how.place];

  // Of every query what it read of keys that its cohort shares, then what of its own.
  const long heads = long(width) * groups * shared;
  std::vector<Read> reads(2 * heads);
  const auto read_values = scratch(2 * heads * value_dim);
  for (long i = 0; i < 2 * heads; i++) reads[i].values = read_values.get() + i * value_dim;
  std::vector<std::pair<int, int>> together;  // cohort, key head
  for (int number = 0; number < int(cohorts.size()); number++) {
    for (int group = 0; group < groups && cohorts[number].num_shared; group++) together.push_back({number, group});
  }
  Pool::shared().run(together.size(), 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const auto [number, group] = together[i];
      const CohortKV& cohort = cohorts[number];
      std::vector<long> first;  // of the heads of each row
      for (const int row : kv_table.rows[number]) {
        if (0 <= row && row < width) first.push_back((long(row) * groups + group) * shared);
      }
      const long count = first.size() * shared;
      const auto scaled = scratch(count * dim);
      std::vector<Read> of_all(count);
      for (long query = 0; query < count; query++) {
        const long head = first[query / shared] + query % shared;
        of_all[query].values = reads[head].values;
        for (int c = 0; c < dim; c++) scaled[query * dim + c] = how.scale * queries[head * dim + c];
      }
      const Keys all{cohort.num_shared, dim, value_dim, cohort.shared_keys.at(0, group),
                     cohort.shared_values.at(0, group)};
      if (count) attend_together(all, scaled.get(), count, of_all.data());
      for (long query = 0; query < count; query++) reads[first[query / shared] + query % shared] = of_all[query];
    }
  });
  Pool::shared().run(long(width) * groups, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const int row = i / groups, group = i % groups;
      std::vector<KeyPiece> pieces;
      const KeyPiece own_tail{tail, keys + i * tail * dim, dim, values + i * tail * value_dim, value_dim};
      const long seen = pieces_of_tail(own_tail, written + row * tail, window, pieces);
      bool shares = false;
      if (row < int(kv_table.homes.size()) && kv_table.homes[row].cohort >= 0 && !cohorts.empty()) {
        const auto [number, line] = kv_table.homes[row];
        const CohortKV& cohort = cohorts[number];
        shares = cohort.num_shared > 0;
        const long stored = cohort.stored[line], hidden = std::max(stored + seen - window, 0L);
        const float *k = cohort.keys.at(line, group), *v = cohort.values.at(line, group);
        const long key_step = cohort.keys.token_step, value_step = cohort.values.token_step;
        if (hidden < stored) {
          pieces.push_back({stored - hidden, k + hidden * key_step, key_step, v + hidden * value_step, value_step});
        }
      }
      Read* own = &reads[heads + i * shared];
      attend_token(pieces, queries + i * shared * dim, shared, dim, value_dim, how.scale, own);
      for (int head = 0; head < shared; head++) {
        const Read both[2] = {own[head], reads[i * shared + head]};
        const float sink = sinks ? sinks[group * shared + head] : -INFINITY;
        put_together(both, 1 + shares, sink, value_dim, out[0] + (i * shared + head) * value_dim);
      }
    }
  });
}
