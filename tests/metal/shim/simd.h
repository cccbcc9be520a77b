// SIMD-group functions and barriers of Metal, as meetings of lanes.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
QUIET inline void threadgroup_barrier(mem_flags flags) { ::barrier(int(flags)); }
QUIET inline void simdgroup_barrier(mem_flags flags) { ::simd_barrier(int(flags)); }

enum SimdOperation { REDUCE = 1, SHUFFLE, VOTE, PREFIX };

template <typename T>
struct Lanes {
  Met met;
  unsigned own = ::running->index % LANES;
  QUIET Lanes(int operation, T value) : met(::meet(operation, &value, sizeof(T))) {
    static_assert(sizeof(T) <= MOST_VALUE_BYTES);
  }
  QUIET bool active(unsigned lane) const { return met.active >> lane & 1; }
  QUIET T operator[](unsigned lane) const {
    if (lane >= unsigned(LANES)) ::fault("SIMD shuffle from lane %u of %d", lane, LANES);
    if (!active(lane)) ::fault("SIMD shuffle from lane %u, which does not take part", lane);
    return __builtin_bit_cast(T, *reinterpret_cast<const Bytes*>(met.values[lane]));
  }
  struct Bytes { char at[sizeof(T)]; };
};

template <typename T, typename Join>
QUIET inline T reduce(T value, Join join) {
  const Lanes<T> lanes(REDUCE, value);
  // As a tree of neighbours: what the butterfly of shuffles gives too.
  T values[LANES];
  bool has[LANES];
  for (int i = 0; i < LANES; ++i)
    if ((has[i] = lanes.active(i))) values[i] = lanes[i];
  for (int step = 1; step < LANES; step *= 2)
    for (int i = 0; i < LANES; i += 2 * step) {
      if (has[i] && has[i + step]) values[i] = join(values[i], values[i + step]);
      else if (has[i + step]) values[i] = values[i + step], has[i] = true;
    }
  return values[0];
}

template <typename T> QUIET T simd_sum(T v) { return reduce(v, [](T a, T b) { return T(a + b); }); }
template <typename T> QUIET T simd_product(T v) { return reduce(v, [](T a, T b) { return T(a * b); }); }
template <typename T> QUIET T simd_max(T v) { return reduce(v, [](T a, T b) { return b > a ? b : a; }); }
template <typename T> QUIET T simd_min(T v) { return reduce(v, [](T a, T b) { return b < a ? b : a; }); }
template <typename T> QUIET T simd_and(T v) { return reduce(v, [](T a, T b) { return T(a & b); }); }
template <typename T> QUIET T simd_or(T v) { return reduce(v, [](T a, T b) { return T(a | b); }); }
template <typename T> QUIET T simd_xor(T v) { return reduce(v, [](T a, T b) { return T(a ^ b); }); }

template <typename T> QUIET T simd_shuffle(T v, ushort lane) { return Lanes<T>(SHUFFLE, v)[lane]; }
template <typename T> QUIET T simd_broadcast(T v, ushort lane) { return Lanes<T>(SHUFFLE, v)[lane]; }
template <typename T> QUIET T simd_shuffle_xor(T v, ushort mask) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes[lanes.own ^ mask];
}
template <typename T> QUIET T simd_shuffle_down(T v, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes.own + delta < unsigned(LANES) ? lanes[lanes.own + delta] : v;
}
template <typename T> QUIET T simd_shuffle_up(T v, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes.own >= delta ? lanes[lanes.own - delta] : v;
}
template <typename T> QUIET T simd_shuffle_and_fill_down(T v, T fill, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes.own + delta < unsigned(LANES) ? lanes[lanes.own + delta] : fill;
}
template <typename T> QUIET T simd_shuffle_and_fill_up(T v, T fill, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes.own >= delta ? lanes[lanes.own - delta] : fill;
}
template <typename T> QUIET T simd_shuffle_rotate_down(T v, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes[(lanes.own + delta) % LANES];
}
template <typename T> QUIET T simd_shuffle_rotate_up(T v, ushort delta) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes[(lanes.own + LANES - delta) % LANES];
}
template <typename T> QUIET T simd_broadcast_first(T v) {
  const Lanes<T> lanes(SHUFFLE, v);
  return lanes[__builtin_ctz(lanes.met.active)];
}
template <typename T> QUIET T simd_prefix_inclusive_sum(T v) {
  const Lanes<T> lanes(PREFIX, v);
  T sum = T(0);
  for (unsigned i = 0; i <= lanes.own; ++i)
    if (lanes.active(i)) sum = T(sum + lanes[i]);
  return sum;
}
template <typename T> QUIET T simd_prefix_exclusive_sum(T v) {
  const Lanes<T> lanes(PREFIX, v);
  T sum = T(0);
  for (unsigned i = 0; i < lanes.own; ++i)
    if (lanes.active(i)) sum = T(sum + lanes[i]);
  return sum;
}
QUIET inline bool simd_any(bool v) { return simd_or(int(v)); }
QUIET inline bool simd_all(bool v) { return simd_and(int(v)); }
QUIET inline bool simd_is_first() {
  const Lanes<int> lanes(VOTE, 0);
  return lanes.own == unsigned(__builtin_ctz(lanes.met.active));
}

template <typename T> struct atomic { T value; };
using atomic_uint = atomic<unsigned>;
using atomic_int = atomic<int>;
using atomic_float = atomic<float>;
enum memory_order { memory_order_relaxed };
#define ATOMIC(name, change)                                                        \
  template <typename T, typename U>                                                 \
  QUIET T atomic_##name##_explicit(atomic<T>* at, U operand, memory_order) {        \
    ::atomic_access(at, sizeof(T));                                                 \
    const T old = at->value;                                                        \
    const T by = T(operand);                                                        \
    at->value = change;                                                             \
    return old;                                                                     \
  }
ATOMIC(fetch_add, T(old + by))
ATOMIC(fetch_sub, T(old - by))
ATOMIC(fetch_max, old > by ? old : by)
ATOMIC(fetch_min, old < by ? old : by)
ATOMIC(fetch_or, T(old | by))
ATOMIC(fetch_and, T(old & by))
ATOMIC(exchange, by)
ATOMIC(store, by)
#undef ATOMIC
template <typename T> QUIET T atomic_load_explicit(const atomic<T>* at, memory_order) {
  ::atomic_access(at, sizeof(T));
  return at->value;
}

}  // namespace metal
