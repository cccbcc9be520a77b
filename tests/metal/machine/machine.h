// What the threads of an emulated GPU ask of it. Knows no Metal type.
#pragma once
#include <cstdint>

constexpr int LANES = 32;            // of a SIMD group
constexpr int MOST_THREADS = 1024;   // of a threadgroup
constexpr int MOST_VALUE_BYTES = 16; // that a lane gives to the others at a time
constexpr int MOST_BUFFERS = 32;     // of a kernel
constexpr int FAULT_BYTES = 512;     // of the text that describes a fault

enum Space { DEVICE = 1, THREADGROUP = 2 };  // the bits of mem_flags

struct Thread {
  uint32_t in_grid[3], group_in_grid[3], in_group[3], group_size[3];
  uint32_t index;  // in the threadgroup
};

struct Buffer {
  char* begin;
  uint64_t size, cell;  // bytes; bytes that one record of accesses stands for
  const char* name;
  int32_t writable, initialised;
};

struct Launch {
  uint32_t grid[3], group[3];  // threads
  uint32_t order;              // of threads and of threadgroups: 0 forward, 1 backward, else a seed
  int32_t num_buffers;
  Buffer buffers[MOST_BUFFERS];
  char fault[FAULT_BYTES];
};

struct Met {
  const char (*values)[MOST_VALUE_BYTES];  // by lane
  uint32_t active;                         // lanes that gave one
};

extern const Launch* launch;
extern Thread* running;  // null between threads

uint32_t num_group_threads();
void barrier(int spaces);
void simd_barrier(int spaces);
Met meet(int operation, const void* value, unsigned size);
void atomic_access(const void* address, unsigned size);
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Between memory.cpp and threads.cpp.
void memory_begin_launch();
void memory_begin_group();
void memory_order(int spaces);
void memory_order_simd(int spaces, unsigned simd_group);
void memory_settle();  // what the running thread wrote last can be read now
bool on_stack(const char* address);

// Of the compiled kernel.
extern "C" void metal_entry(char* const* buffers, const Thread* thread);
