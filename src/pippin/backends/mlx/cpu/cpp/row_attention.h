// Attention of decode rows over their tails and what the KV table has of them: one token each, or one and
// drafts behind it.
#pragma once

#include "kv_table.h"
#include "pool.h"

constexpr long NO_WINDOW = 1L << 40;  // tokens

// How a layer's rows attend: its place among the KV layers, and how far back it looks (0: to the first).
struct RowAttention {
  int place, window;
  float scale;
};

enum RowInput {
  TAIL_KEYS,    // [width, heads, tokens, dim]
  TAIL_VALUES,
  NEW_KEYS,     // [width, heads, count, dim]
  NEW_VALUES,
  CURSOR,       // int32 [width]: the column of the tail where a row's new ones begin
  ROW_QUERIES,  // [width, query heads, count, dim]
  TABLE,
  SINKS,        // [query heads]; there may be none
};

// New columns of one side of the tails, where they lie. mlx writes in place only what has one holder, and with two
// steps in flight it would copy all of a tail. A holder of an older version reads other columns: one that it
// reads is not written again, and tails that are begun anew have memory of their own (rows/decode_rows.py).
// What is no column of the tail is not written.
inline void write_tail(const View& tail, const View& columns, const int* cursor, float* out) {
  std::vector<float> room;
  const float* before = tail.all();
  if (out != before) std::copy(before, before + tail.size(), out);
  const long heads = tail.dim(1), tokens = tail.dim(2), dim = tail.dim(3), count = columns.dim(2);
  for (long line = 0; line < columns.lines(); line++) {
    const long head = line / count, at = cursor[head / heads] + line % count;
    if (at >= tokens) continue;
    const float* from = columns.line(line, room);
    std::copy(from, from + dim, out + (head * tokens + at) * dim);
  }
}

// What one row's queries look at: pieces of keys, and which of these each of the row's tokens sees.
struct Visible {
  std::vector<Keys> pieces;
  std::vector<std::pair<long, long>> of_token;
};

// Of `tokens` the first sees so many `known` keys and its own, which is the next one; each after it one more.
inline Visible visible_to(const std::vector<Keys>& pieces, long known, int tokens, long window) {
  Visible found;
  const long end = total(pieces);
  const long hidden = std::clamp(known + 1 - window, 0L, end);  // from the first, and so from all
  long left = hidden;
  for (const Keys& piece : pieces) {
    const long passed = std::min(left, piece.count);
    left -= passed;
    if (passed < piece.count) found.pieces.push_back(piece.behind(passed));
  }
  for (long last = known + 1; last <= known + tokens; last++) {
    const long seen = std::min(last, end), first = std::clamp(last - window, hidden, seen);
    found.of_token.push_back({first - hidden, seen - hidden});
  }
  return found;
}

// out: the tails with the new columns, and what the queries read.
inline void run_row_attention(const Inputs& in, const Outputs& out, const RowAttention& how) {
  const int* cursor = in[CURSOR].all<int>();
  write_tail(in[TAIL_KEYS], in[NEW_KEYS], cursor, out[0]);
  write_tail(in[TAIL_VALUES], in[NEW_VALUES], cursor, out[1]);
  const float *queries = in[ROW_QUERIES].all(), *keys = out[0], *values = out[1];
  const KVTable& kv_table = **in[TABLE].data<const KVTable*>();
  const float* sinks = in.size() > SINKS ? in[SINKS].all() : nullptr;
  const int width = in[ROW_QUERIES].dim(0), tokens = in[ROW_QUERIES].dim(2), dim = in[ROW_QUERIES].dim(3);
  const int groups = in[TAIL_KEYS].dim(1), shared = in[ROW_QUERIES].dim(1) / groups, value_dim = in[TAIL_VALUES].dim(3);
  const int of_row = shared * tokens;  // queries of a row that read the same key head: head by head
  const long tail = in[TAIL_KEYS].dim(2), window = how.window ? how.window : NO_WINDOW;
  const LayerKV& layer = kv_table.layers[how.place];
  const WindowClass& lies = *layer.lies;

  // Of every query what it read of keys that are its row's alone; then of each span that rows read together
  // and each key head, what its rows' queries read.
  const long num = long(width) * groups * of_row;
  std::vector<long> first;  // read of each span
  long num_reads = num;
  for (const SharedSpan& span : lies.together) {
    first.push_back(num_reads);
    num_reads += long(span.rows.size()) * groups * of_row;
  }
  std::vector<Read> reads(num_reads);
  const auto read_values = scratch(num_reads * value_dim);
  for (long i = 0; i < num_reads; i++) reads[i].values = read_values.get() + i * value_dim;
  Pool::shared().run(long(lies.together.size()) * groups, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const int number = i / groups, group = i % groups;
      const auto& [span, rows] = lies.together[number];
      const long count = long(rows.size()) * of_row;
      const auto scaled = scratch(count * dim);
      for (long query = 0; query < count; query++) {
        const long own = (long(rows[query / of_row]) * groups + group) * of_row + query % of_row;
        for (int c = 0; c < dim; c++) scaled[query * dim + c] = how.scale * queries[own * dim + c];
      }
      const Keys all = layer.segments[span.segment].at(group, span);
      attend_together(all, scaled.get(), count, &reads[first[number] + group * count]);
    }
  });
  static const std::vector<Span> NO_SPANS;
  static const std::vector<std::pair<int, int>> AMONG_NONE;
  Pool::shared().run(long(width) * groups, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) {
      const int row = i / groups, group = i % groups;
      std::vector<Keys> pieces;
      for (const Span& span : row < int(lies.own.size()) ? lies.own[row] : NO_SPANS) {
        pieces.push_back(layer.segments[span.segment].at(group, span));
      }
      const long known = total(pieces) + cursor[row], in_tail = std::min<long>(cursor[row] + tokens, tail);
      pieces.push_back({in_tail, dim, value_dim, keys + i * tail * dim, values + i * tail * value_dim});
      const auto& among = row < int(lies.among.size()) ? lies.among[row] : AMONG_NONE;
      const Visible visible = visible_to(pieces, known, tokens, window);
      Read* own = &reads[i * of_row];
      const auto seen = [&](int query) { return visible.of_token[query % tokens]; };
      attend_pieces(visible.pieces, queries + i * of_row * dim, of_row, dim, value_dim, how.scale, seen, own);
      std::vector<Read> all;
      for (int query = 0; query < of_row; query++) {
        all.assign(1, own[query]);
        for (const auto& [number, place] : among) {
          const long count = long(lies.together[number].rows.size()) * of_row;
          all.push_back(reads[first[number] + group * count + place * of_row + query]);
        }
        const float sink = sinks ? sinks[group * shared + query / tokens] : -INFINITY;
        put_together(all, sink, value_dim, out[2] + (i * of_row + query) * value_dim);
      }
    }
  });
}
