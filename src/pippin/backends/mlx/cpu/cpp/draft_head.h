// The drafts of an MTP head with one dense layer, one after the other. What the head computes is in
// backends/mtp_weights.py, where a token's keys and values go in drafts/rings.py.
//
//   tokens of a step, the hidden vectors before them  ->  keys and values
//   the last token of each row  ->  a draft  ->  a draft  ->  ...
//
// Of tokens that are no row's last one keys and values alone are computed.
#pragma once

#include "runs.h"

enum HeadInput {
  HIDDEN,     // [rows, n, size]: before each token
  TOKENS,     // int32 [rows, n]
  COUNTS,     // int32 [rows]: those in front of a row's last one; what is behind it is not read
  FIRST,      // int32 [rows]: the place of the first token
  KEYS,       // [rows, key heads, cells, dim]: rings
  VALUES,     // likewise
  CHOICES,    // [rows, 4]: as run_choose has them
  NOISE,      // uint32 [rows, drafts, 2]: keys
  EMBEDDING,  // [ids, size]
  EMBEDDING_NORM,
  HIDDEN_NORM,
  JOIN,  // this and the other products: packed weights
  INPUT_NORM,
  QUERY,  // of each head a query, then its gate
  KEY,
  VALUE,
  QUERY_NORM,
  KEY_NORM,
  OUTPUT,
  INNER_NORM,
  GATE,
  UP,
  DOWN,
  LAST_NORM,
  IDS,          // the model's own head, of the first ids
  FREQUENCIES,  // of rotations
  HEAD_INPUTS,
};

struct DraftHead {
  int num_wrong, num_ids;  // cells that rejected drafts may have been written to; ids that drafts are chosen among
  float eps, rope_scale;
};

struct HeadToken {
  int row, place, token;
  const float* hidden;
};

// A line of numbers of any width.
inline void read_line(const View& lines, long line, float* to) {
  const long count = lines.dim(-1);
  with_numbers(lines, [&](const auto* all) {
    using Number = std::remove_cvref_t<decltype(*all)>;
    const Number* from = all + line * count;
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    if (i == count) return;
    Number edge[LANES] = {};
    std::copy(from + i, from + count, edge);
    const Vector last = load(edge);
    for (int lane = 0; i < count; i++, lane++) to[i] = last[lane];
  });
}

class HeadRun {
 public:
  HeadRun(const Inputs& in, const DraftHead& head, float* keys, float* values)
      : in_(in), head_(head), keys_(keys), values_(values), rows_(in[HIDDEN].dim(0)), size_(in[HIDDEN].dim(2)),
        key_heads_(in[KEYS].dim(1)), cells_(in[KEYS].dim(2)), dim_(in[KEYS].dim(3)),
        heads_(in[OUTPUT].dim(1) / dim_), last_(long(rows_) * size_) {}

  int rows() const { return rows_; }

  // What the layer made of a row's last token.
  const float* hidden(int row) const { return &last_[long(row) * size_]; }

  // Tokens in the order of their rows. `reads`: a draft is to follow, so each row has one.
  void feed(const std::vector<HeadToken>& tokens, bool reads) {
    const long count = tokens.size(), key_size = long(key_heads_) * dim_;
    Floats joined(count * 2 * size_), entered(count * size_), lines(count * size_);
    for (long i = 0; i < count; i++) {
      float* line = &joined[i * 2 * size_];
      read_line(in_[EMBEDDING], std::clamp(tokens[i].token, 0, in_[EMBEDDING].dim(0) - 1), line);
      norm(EMBEDDING_NORM, line, size_, line);
      norm(HIDDEN_NORM, tokens[i].hidden, size_, line + size_);
    }
    multiply({{joined, count, JOIN, entered}});
    std::vector<long> ends(rows_);  // by row: its last token
    for (long i = 0; i < count; i++) {
      norm(INPUT_NORM, &entered[i * size_], size_, &lines[i * size_]);
      ends[tokens[i].row] = i;
    }
    Floats keys(count * key_size), values(count * key_size), asked, queries;
    std::vector<Job> jobs{{lines, count, KEY, keys}, {lines, count, VALUE, values}};
    if (reads) {
      asked = picked(lines, ends);
      queries.resize(2L * rows_ * heads_ * dim_);
      jobs.push_back({asked, rows_, QUERY, queries});
    }
    multiply(jobs);
    for (long i = 0; i < count; i++) keep(tokens[i], &keys[i * key_size], &values[i * key_size]);
    if (!reads) return;
    Floats read(long(rows_) * heads_ * dim_);
    for (int row = 0; row < rows_; row++) {
      const long at = long(row) * heads_ * dim_;
      attend(tokens[ends[row]], &queries[2 * at], &read[at]);
    }
    run_inner(picked(entered, ends), read);
  }

  // A draft of each row, to every `step`th number.
  void choose_ids(const float* choices, const uint32_t* noise, int* drafts, int step) const {
    Floats logits(long(rows_) * head_.num_ids);
    multiply({{last_, rows_, IDS, logits}});
    Pool::shared().run(rows_, 1, [&](long from, long to) {
      for (long row = from; row < to; row++) {
        const float* given = choices + 4 * row;
        const uint32_t* key = noise + 2 * row * step;
        const Choice choice{given[0], long(given[1]), given[2], given[3], {key[0], key[1]}};
        drafts[row * step] = choose(choice, &logits[row * head_.num_ids], head_.num_ids);
      }
    });
  }

 private:
  struct Job {
    const Floats& x;
    long rows;
    HeadInput weights;
    Floats& y;
  };

  void multiply(const std::vector<Job>& jobs) const {
    std::vector<Product> products;
    std::vector<const View*> weights;
    for (const Job& job : jobs) {
      const View& panels = in_[job.weights];
      products.push_back({job.rows, long(job.y.size()) / job.rows, panels.dim(1), job.x.data(), job.y.data()});
      weights.push_back(&panels);
    }
    multiply_all(products, weights, {});
  }

  void norm(HeadInput weight, const float* x, long count, float* y) const {
    rms_norm(x, in_[weight].data<float>(), head_.eps, count, y);
  }

  Floats picked(const Floats& lines, const std::vector<long>& which) const {
    Floats found;
    for (const long line : which) {
      found.insert(found.end(), lines.begin() + line * size_, lines.begin() + (line + 1) * size_);
    }
    return found;
  }

  // In place: normed, and turned by the place.
  void turn(HeadInput weight, float* x, int heads, long step, int place) const {
    const long half = in_[FREQUENCIES].size();
    const float* frequency = in_[FREQUENCIES].data<float>();
    Floats cos(half), sin(half), normed(dim_);
    for (long i = 0; i < half; i++) {
      const float angle = place * head_.rope_scale * frequency[i];
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
    for (int n = 0; n < heads; n++, x += step) {
      norm(weight, x, dim_, normed.data());
      rotate(normed.data(), cos.data(), sin.data(), half, dim_, x);
    }
  }

  long first_cell(int row, int group) const { return (long(row) * key_heads_ + group) * cells_; }

  void keep(const HeadToken& token, float* keys, const float* values) {
    turn(KEY_NORM, keys, key_heads_, dim_, token.place);
    const int cell = token.place % (cells_ - 1);
    for (int group = 0; group < key_heads_; group++) {
      const long at = (first_cell(token.row, group) + cell) * dim_, from = long(group) * dim_;
      std::copy(keys + from, keys + from + dim_, keys_ + at);
      std::copy(values + from, values + from + dim_, values_ + at);
    }
  }

  // Over the newest cells of its row; `queries` [heads, query and gate].
  void attend(const HeadToken& token, float* queries, float* out) const {
    turn(QUERY_NORM, queries, heads_, 2 * dim_, token.place);
    const int length = cells_ - 1, shared = heads_ / key_heads_;
    const int oldest = std::max(0, token.place - (length - head_.num_wrong) + 1);
    const long count = token.place - oldest + 1, start = oldest % length;
    const long before_end = std::min(count, length - start);
    Floats own(long(shared) * dim_), read(own.size());
    for (int group = 0; group < key_heads_; group++) {
      const long base = first_cell(token.row, group) * dim_;
      const auto piece = [&](long cell, long number) {
        const long at = base + cell * dim_;
        return Keys{number, dim_, dim_, keys_ + at, values_ + at};
      };
      std::vector<Read> reads(shared);
      for (int n = 0; n < shared; n++) {
        const float* query = queries + long(group * shared + n) * 2 * dim_;
        std::copy(query, query + dim_, &own[long(n) * dim_]);
        reads[n].values = &read[long(n) * dim_];
      }
      const auto all = [&](int) { return std::pair{0L, count}; };
      attend_pieces({piece(start, before_end), piece(0, count - before_end)}, own.data(), shared, dim_, dim_,
                    1.0f / std::sqrt(float(dim_)), all, reads.data());
      for (int n = 0; n < shared; n++) {
        const long head = group * shared + n;
        const float* gate = queries + head * 2 * dim_ + dim_;
        for (int c = 0; c < dim_; c++) out[head * dim_ + c] = reads[n].values[c] / reads[n].total * sigmoid(gate[c]);
      }
    }
  }

  // From what a row's last token entered with, and what it read, to its hidden vector.
  void run_inner(Floats x, const Floats& read) {
    Floats added(x.size()), lines(x.size()), gate(long(rows_) * in_[DOWN].dim(1)), up(gate.size());
    const auto add = [&] {
      for (size_t i = 0; i < x.size(); i++) x[i] += added[i];
    };
    const auto norm_lines = [&](HeadInput weight, Floats& to) {
      for (int row = 0; row < rows_; row++) norm(weight, &x[long(row) * size_], size_, &to[long(row) * size_]);
    };
    multiply({{read, rows_, OUTPUT, added}});
    add();
    norm_lines(INNER_NORM, lines);
    multiply({{lines, rows_, GATE, gate}, {lines, rows_, UP, up}});
    for (size_t i = 0; i < gate.size(); i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
    multiply({{gate, rows_, DOWN, added}});
    add();
    norm_lines(LAST_NORM, last_);
  }

  const Inputs& in_;
  const DraftHead head_;
  float *keys_, *values_;
  const int rows_, size_, key_heads_, cells_, dim_, heads_;
  Floats last_;
};

// out: drafts, int32 [rows, drafts]; the rings after them.
inline void run_draft_head(const Inputs& in, const Outputs& out, const DraftHead& head) {
  for (const int side : {0, 1}) {
    const View& ring = in[KEYS + side];
    const float* from = ring.all();
    std::copy(from, from + ring.size(), out[1 + side]);
  }
  const float *hidden = in[HIDDEN].all(), *choices = in[CHOICES].all();
  const int *tokens = in[TOKENS].all<int>(), *counts = in[COUNTS].all<int>(), *first = in[FIRST].all<int>();
  const uint32_t* noise = in[NOISE].all<uint32_t>();
  const int num_tokens = in[TOKENS].dim(1), size = in[HIDDEN].dim(2), num_drafts = in[NOISE].dim(1);
  int* drafts = reinterpret_cast<int*>(out[0]);
  HeadRun run(in, head, out[1], out[2]);
  std::vector<HeadToken> fed;
  for (int row = 0; row < run.rows(); row++) {
    for (int n = 0; n <= std::clamp(counts[row], 0, num_tokens - 1); n++) {
      const long at = long(row) * num_tokens + n;
      fed.push_back({row, std::max(first[row], 0) + n, tokens[at], hidden + at * size});
    }
  }
  run.feed(fed, num_drafts > 0);
  for (int number = 0; number < num_drafts; number++) {
    run.choose_ids(choices, noise + 2 * number, drafts + number, num_drafts);
    if (number + 1 == num_drafts) break;
    std::vector<HeadToken> next;
    for (const HeadToken& token : fed) {
      const bool is_last = &token == &fed.back() || (&token + 1)->row != token.row;
      const int row = token.row;
      if (is_last) next.push_back({row, token.place + 1, drafts[long(row) * num_drafts + number], run.hidden(row)});
    }
    fed = std::move(next);
    run.feed(fed, true);
  }
}
