// Attention of decode rows over their tails and what the KV table has of them: one token each, or one and
// drafts behind it.
#pragma once

#include "attention.h"
#include "kv_table.h"
#include "pool.h"

constexpr long NO_WINDOW = 1L << 40;  // tokens

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

// Columns of the tails of rows, where they lie. mlx writes in place only what has one holder, and with two
// steps in flight it would copy all of a tail. A holder of an older version reads other columns: one that it
// reads is not written again, and tails that are begun anew have memory of their own (rows/arrays.py).
//
// in: keys and values [width, heads, tokens, dim]; those of the columns [width, heads, count, dim]; the number of
// the first, one for all rows or one for each (int32). What is no column of the tail is not written.
inline void run_tail_write(const Inputs& in, const Outputs& out) {
  std::vector<float> room;
  const int* first = in[4].data<int>();
  const bool each = in[4].size() > 1;
  for (int side = 0; side < 2; side++) {
    const View &tail = in[side], &columns = in[2 + side];
    const float* before = tail.all(room);
    if (out[side] != before) std::copy(before, before + tail.size(), out[side]);
    const long heads = tail.dim(1), tokens = tail.dim(2), dim = tail.dim(3), count = columns.dim(2);
    for (long line = 0; line < columns.lines(); line++) {
      const long head = line / count, at = first[each ? head / heads : 0] + line % count;
      if (at < 0 || at >= tokens) continue;
      const float* from = columns.line(line, room);
      std::copy(from, from + dim, out[side] + (head * tokens + at) * dim);
    }
  }
}

// What one row's queries look at: pieces of keys, and which of these each of the row's tokens sees.
struct Visible {
  std::vector<KeyPiece> pieces;
  std::vector<std::pair<long, long>> of_token;
};

// Its one token sees all of its main and tail that its window has.
inline Visible visible_to_one(KeyPiece main, const KeyPiece& tail, const char* written, long window) {
  Visible found;
  const long seen = pieces_of_tail(tail, written, window, found.pieces);
  const long hidden = std::max(main.count + seen - window, 0L);
  if (hidden < main.count) found.pieces.push_back(main.behind(hidden));
  long count = 0;
  for (const KeyPiece& piece : found.pieces) count += piece.count;
  found.of_token.push_back({0, count});
  return found;
}

// The first of `tokens` sees the main, `before` of the tail's columns and its own, which is the next one; each
// after it one more.
inline Visible visible_to_drafts(KeyPiece main, KeyPiece tail, long before, int tokens, long window) {
  Visible found;
  const long stored = main.count;
  tail.count = std::clamp(before + tokens, 0L, tail.count);
  const long hidden = std::max(stored + before + 1 - window, 0L);  // from the first token, and from all others
  if (hidden < stored) found.pieces.push_back(main.behind(hidden));
  const long passed = std::clamp(hidden - stored, 0L, tail.count);
  found.pieces.push_back(tail.behind(passed));
  const long start = std::min(hidden, stored) + passed, end = stored + tail.count;
  for (int token = 0; token < tokens; token++) {
    const long last = std::clamp(stored + before + 1 + token, start, end);
    const long first = std::clamp(stored + before + 1 + token - window, start, last);
    found.of_token.push_back({first - start, last - start});
  }
  return found;
}

// in: queries [width, heads, count, dim]; the tail's keys and values; which of its tokens are a row's own
// [width, tokens], for one query, or (int32) how many were before this step's [width]; a KV table; maybe sinks
// [heads].
inline void run_row_attention(const Inputs& in, const Outputs& out, const RowAttention& how) {
  std::vector<float> rooms[3], sink_room;
  std::vector<char> written_room;
  std::vector<int> before_room;
  const float *queries = in[0].all(rooms[0]), *keys = in[1].all(rooms[1]), *values = in[2].all(rooms[2]);
  const bool drafts = in[3].dtype() == mx::int32;
  const char* written = drafts ? nullptr : in[3].all(written_room);
  const int* before = drafts ? in[3].all(before_room) : nullptr;
  const KVTable& kv_table = **in[4].data<const KVTable*>();
  const float* sinks = in.size() > 5 ? in[5].all(sink_room) : nullptr;
  const int width = in[0].dim(0), groups = in[1].dim(1), shared = in[0].dim(1) / groups, tokens = in[0].dim(2);
  const int dim = in[0].dim(3), value_dim = in[2].dim(3);
  const int of_row = shared * tokens;  // queries of a row that read the same key head: head by head
  const long tail = in[1].dim(2), window = how.window ? how.window : NO_WINDOW;
  static const std::vector<CohortKV> NONE;
  const auto& cohorts = kv_table.layers.empty() ? NONE : kv_table.layers[how.place];

  // Of every query what it read of keys that its cohort shares, then what of its own.
  const long num = long(width) * groups * of_row;
  std::vector<Read> reads(2 * num);
  const auto read_values = scratch(2 * num * value_dim);
  for (long i = 0; i < 2 * num; i++) reads[i].values = read_values.get() + i * value_dim;
  std::vector<std::pair<int, int>> together;  // cohort, key head
  for (int number = 0; number < int(cohorts.size()); number++) {
    for (int group = 0; group < groups && cohorts[number].num_shared; group++) together.push_back({number, group});
  }
  Pool::shared().run(together.size(), 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const auto [number, group] = together[i];
      const CohortKV& cohort = cohorts[number];
      std::vector<long> first;  // of the queries of each row
      for (const int row : kv_table.rows[number]) {
        if (0 <= row && row < width) first.push_back((long(row) * groups + group) * of_row);
      }
      const long count = first.size() * of_row;
      const auto scaled = scratch(count * dim);
      std::vector<Read> of_all(count);
      for (long query = 0; query < count; query++) {
        const long own = first[query / of_row] + query % of_row;
        of_all[query].values = reads[own].values;
        for (int c = 0; c < dim; c++) scaled[query * dim + c] = how.scale * queries[own * dim + c];
      }
      const Keys all{cohort.num_shared, dim, value_dim, cohort.shared_keys.at(0, group),
                     cohort.shared_values.at(0, group)};
      if (count) attend_together(all, scaled.get(), count, of_all.data());
      for (long query = 0; query < count; query++) reads[first[query / of_row] + query % of_row] = of_all[query];
    }
  });
  Pool::shared().run(long(width) * groups, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const int row = i / groups, group = i % groups;
      const KeyPiece own_tail{tail, keys + i * tail * dim, dim, values + i * tail * value_dim, value_dim};
      KeyPiece main{};
      bool shares = false;
      if (row < int(kv_table.homes.size()) && kv_table.homes[row].cohort >= 0 && !cohorts.empty()) {
        const auto [number, line] = kv_table.homes[row];
        const CohortKV& cohort = cohorts[number];
        shares = cohort.num_shared > 0;
        main = {cohort.stored[line], cohort.keys.at(line, group), cohort.keys.token_step,
                cohort.values.at(line, group), cohort.values.token_step};
      }
      const Visible visible = drafts ? visible_to_drafts(main, own_tail, before[row], tokens, window)
                                     : visible_to_one(main, own_tail, written + row * tail, window);
      Read* own = &reads[num + i * of_row];
      const auto seen = [&](int query) { return visible.of_token[query % tokens]; };
      attend_pieces(visible.pieces, queries + i * of_row * dim, of_row, dim, value_dim, how.scale, seen, own);
      for (int query = 0; query < of_row; query++) {
        const Read both[2] = {own[query], reads[i * of_row + query]};
        const float sink = sinks ? sinks[group * shared + query / tokens] : -INFINITY;
        put_together(both, 1 + shares, sink, value_dim, out[0] + (i * of_row + query) * value_dim);
      }
    }
  });
}
