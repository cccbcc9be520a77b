// Checks every access of a kernel: bounds, memory that nothing wrote, races. Knows no schedule.
//
// clang puts a call before each access (-fsanitize=thread); the functions it calls are these.
// Two accesses are ordered by a barrier of the threadgroup whose flags name their address space, or
// by one of the SIMD group between its lanes. A race is two that are not, of which one writes.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "machine.h"

extern "C" char __start_threadgroup_memory[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_threadgroup_memory[] __attribute__((weak, visibility("hidden")));

namespace {

constexpr uint32_t NOTHING = 0, HOST = ~0u, ALWAYS = ~0u;
enum Readers : uint32_t { ONE, LANES_OF_ONE_GROUP, MANY };

struct Access {
  uint32_t thread;  // of the grid, from 1
  uint32_t epoch, simd_epoch;
};

struct Cell {
  Access write, read;
  uint32_t readers;
};

struct Region {
  Buffer buffer;
  Space space;
  Cell* cells;  // null: only read
};

Region regions[MOST_BUFFERS + 1];
int num_regions;
uint32_t epoch[3], simd_epoch[3][MOST_THREADS / LANES], first_thread, num_last_threads;

struct {
  char* at;
  unsigned size;
  uint32_t other;
  char old[16];
} unsettled;  // another thread wrote here too: a race, unless both write the same

uint32_t me() { return first_thread + running->index; }

bool ordered(const Access& access, Space space, bool any_lane = false) {
  if (access.thread == HOST || access.thread == NOTHING) return true;
  if (access.thread == me() && !any_lane) return true;
  if (access.thread < first_thread || access.epoch == ALWAYS) return false;
  if (access.epoch != epoch[space]) return true;
  const uint32_t group = (access.thread - first_thread) / LANES;
  return group == running->index / LANES && access.simd_epoch != simd_epoch[space][group];
}

[[noreturn]] void race(const Region& region, const char* address, const char* what,
                       uint32_t other) {
  const char* where = other == NOTHING || other < first_thread ? "in another threadgroup" : "";
  char index[40] = "";
  if (!*where) snprintf(index, sizeof index, "%u", other - first_thread);
  fault("race: %s at byte %td of %s, with thread %s%s and no barrier between", what,
        address - region.buffer.begin, region.buffer.name, index, where);
}

void note_read(Cell& cell, Space space) {
  const Access now = {me(), epoch[space], simd_epoch[space][running->index / LANES]};
  const Access& last = cell.read;
  if (last.thread == NOTHING || last.thread == HOST) {
    cell.readers = ONE;
  } else if (last.thread < first_thread || last.epoch == ALWAYS) {
    cell.read = {me(), ALWAYS, 0};
    cell.readers = MANY;
    return;
  } else if (last.epoch != now.epoch) {
    cell.readers = ONE;
  } else if (last.thread != now.thread) {
    const bool same = (last.thread - first_thread) / LANES == running->index / LANES;
    if (!same)
      cell.readers = MANY;
    else if (cell.readers == ONE)
      cell.readers = last.simd_epoch == now.simd_epoch ? LANES_OF_ONE_GROUP : ONE;
  }
  cell.read = now;
}

bool reads_ordered(const Cell& cell, Space space) {
  if (cell.read.thread == NOTHING || cell.readers == ONE) return ordered(cell.read, space);
  if (cell.readers == LANES_OF_ONE_GROUP) return ordered(cell.read, space, true);
  return cell.read.epoch != ALWAYS && cell.read.thread >= first_thread &&
         cell.read.epoch != epoch[space];
}

void check_cells(Region& region, char* address, unsigned size, bool writes) {
  const uint64_t first = (address - region.buffer.begin) / region.buffer.cell;
  const uint64_t last = (address + size - 1 - region.buffer.begin) / region.buffer.cell;
  for (uint64_t i = first; i <= last; ++i) {
    Cell& cell = region.cells[i];
    if (!writes) {
      if (cell.write.thread == NOTHING)
        fault("reads byte %td of %s, which nothing has written", address - region.buffer.begin,
              region.buffer.name);
      if (!ordered(cell.write, region.space))
        race(region, address, "read after write", cell.write.thread);
      note_read(cell, region.space);
      continue;
    }
    if (!reads_ordered(cell, region.space))
      race(region, address, "write after read", cell.read.thread);
    if (!ordered(cell.write, region.space) && size <= sizeof unsettled.old) {
      unsettled.at = address;
      unsettled.size = size;
      unsettled.other = cell.write.thread;
      for (unsigned byte = 0; byte < size; ++byte) unsettled.old[byte] = address[byte];
    }
    cell.write = {me(), epoch[region.space],
                  simd_epoch[region.space][running->index / LANES]};
  }
}

Region* region_of(const char* address) {
  Region* nearest = nullptr;
  uint64_t least = ~0ull;
  for (int i = 0; i < num_regions; ++i) {
    Region& region = regions[i];
    const char* end = region.buffer.begin + region.buffer.size;
    if (address >= region.buffer.begin && address < end) return &region;
    const uint64_t distance =
        address < region.buffer.begin ? region.buffer.begin - address : address - end;
    if (distance < least) least = distance, nearest = &region;
  }
  return nearest;
}

void check(void* place, unsigned size, bool writes, bool atomic = false) {
  char* address = static_cast<char*>(place);
  if (!running || on_stack(address)) return;
  memory_settle();
  Region* region = region_of(address);
  if (!region) fault("accesses memory that is no buffer's");
  const int64_t at = address - region->buffer.begin;
  if (at < 0 || at + size > region->buffer.size)
    fault("out of bounds: %s %u bytes at byte %lld of %s, which has %llu",
          writes ? "writes" : "reads", size, static_cast<long long>(at), region->buffer.name,
          static_cast<unsigned long long>(region->buffer.size));
  if (writes && !region->buffer.writable) fault("writes to input %s", region->buffer.name);
  if (!region->cells) return;
  if (!atomic) return check_cells(*region, address, size, writes);
  for (uint64_t i = at / region->buffer.cell; i <= (at + size - 1) / region->buffer.cell; ++i)
    region->cells[i].write.thread = HOST;
}

void clear(Region& region) {
  const uint64_t count = (region.buffer.size + region.buffer.cell - 1) / region.buffer.cell;
  for (uint64_t i = 0; i < count; ++i) {
    region.cells[i] = Cell();
    if (region.buffer.initialised) region.cells[i].write.thread = HOST;
  }
}

void add(const Buffer& buffer, Space space) {
  Region& region = regions[num_regions++];
  free(region.cells);
  region = {buffer, space, nullptr};
  if (!buffer.writable) return;
  region.cells = static_cast<Cell*>(calloc(buffer.size / buffer.cell + 1, sizeof(Cell)));
  clear(region);
}

}  // namespace

extern "C" uint64_t metal_threadgroup_bytes() {
  return __stop_threadgroup_memory - __start_threadgroup_memory;
}

void memory_begin_launch() {
  num_regions = 0;
  first_thread = 1;
  num_last_threads = 0;
  unsettled.size = 0;
  for (int i = 0; i < launch->num_buffers; ++i) add(launch->buffers[i], DEVICE);
  if (const uint64_t size = metal_threadgroup_bytes())
    add({__start_threadgroup_memory, size, 1, "threadgroup memory", 1, 0}, THREADGROUP);
}

void memory_begin_group() {
  first_thread += num_last_threads;
  num_last_threads = num_group_threads();
  memory_order(DEVICE | THREADGROUP);
  for (int i = 0; i < num_regions; ++i) {
    Region& region = regions[i];
    if (region.space != THREADGROUP) continue;
    clear(region);
    for (uint64_t at = 0; at < region.buffer.size; ++at) region.buffer.begin[at] = '\xff';
  }
}

void memory_order(int spaces) {
  for (int space : {DEVICE, THREADGROUP})
    if (spaces & space) ++epoch[space];
}

void memory_order_simd(int spaces, unsigned simd_group) {
  for (int space : {DEVICE, THREADGROUP})
    if (spaces & space) ++simd_epoch[space][simd_group];
}

void memory_settle() {
  const unsigned size = unsettled.size;
  unsettled.size = 0;
  for (unsigned i = 0; i < size; ++i)
    if (unsettled.at[i] != unsettled.old[i])
      race(*region_of(unsettled.at), unsettled.at, "write after write", unsettled.other);
}

void atomic_access(const void* address, unsigned size) {
  check(const_cast<void*>(address), size, true, true);
}

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(size)                                                            \
  void __tsan_read##size(void* at) { check(at, size, false); }                  \
  void __tsan_write##size(void* at) { check(at, size, true); }                  \
  void __tsan_unaligned_read##size(void* at) { check(at, size, false); }        \
  void __tsan_unaligned_write##size(void* at) { check(at, size, true); }        \
  void __tsan_read_write##size(void* at) {                                      \
    check(at, size, false);                                                     \
    check(at, size, true);                                                      \
  }                                                                             \
  void __tsan_unaligned_read_write##size(void* at) { __tsan_read_write##size(at); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN void* __tsan_memcpy(void* to, const void* from, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    check(const_cast<char*>(static_cast<const char*>(from)) + i, 1, false);
    check(static_cast<char*>(to) + i, 1, true);
    static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
  }
  return to;
}
HIDDEN void* __tsan_memmove(void* to, const void* from, size_t size) {
  if (to <= from) return __tsan_memcpy(to, from, size);
  for (size_t i = size; i-- > 0;) __tsan_memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, 1);
  return to;
}
HIDDEN void* __tsan_memset(void* to, int value, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    check(static_cast<char*>(to) + i, 1, true);
    static_cast<volatile char*>(to)[i] = static_cast<char>(value);
  }
  return to;
}
// clang 14 calls these by their plain names.
HIDDEN void* memcpy(void* to, const void* from, size_t size) { return __tsan_memcpy(to, from, size); }
HIDDEN void* memmove(void* to, const void* from, size_t size) { return __tsan_memmove(to, from, size); }
HIDDEN void* memset(void* to, int value, size_t size) { return __tsan_memset(to, value, size); }

// -fsanitize=array-bounds,alignment,shift,integer-divide-by-zero: what each is given starts with a place.
struct Place {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, what, ...) \
  void __ubsan_handle_##name(Place* place, ##__VA_ARGS__) { fault("%s in line %u of the kernel", what, place->line); }
UNDEFINED(out_of_bounds, "out of bounds: an index past its array's end", void*)
UNDEFINED(type_mismatch_v1, "an address that is not aligned for its type", void*)
UNDEFINED(shift_out_of_bounds, "a shift by too many bits", void*, void*)
UNDEFINED(divrem_overflow, "a division by zero", void*, void*)
}
