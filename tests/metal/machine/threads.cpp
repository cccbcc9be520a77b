// Runs the threads of one threadgroup after the other as fibers. Knows no memory.
//
// A SIMD group runs until its lanes wait at a barrier or have returned; lanes meet at SIMD operations.
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

#include "machine.h"

const Launch* launch;
Thread* running;

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr int SIMD_BARRIER = -1;

enum State { READY, AT_SIMD, AT_BARRIER, RETURNED };

struct Fiber {
  Thread thread;
  State state;
  int operation, spaces;
  bool started;
  jmp_buf context;
};

struct SimdGroup {
  char given[LANES][MOST_VALUE_BYTES], met[LANES][MOST_VALUE_BYTES];
  uint32_t active;
};

Fiber fibers[MOST_THREADS];
SimdGroup simd_groups[MOST_THREADS / LANES];
Launch* output;
char* stacks;
char* buffers[MOST_BUFFERS];
jmp_buf scheduler, failed;
ucontext_t first_context, scheduler_context;
Fiber* current;
uint32_t num_threads, random_state;

void give_way() {
  memory_settle();
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void run_fiber() {
  for (;;) {
    metal_entry(buffers, &current->thread);
    current->state = RETURNED;
    give_way();
  }
}

void resume(Fiber& fiber) {
  current = &fiber;
  running = &fiber.thread;
  if (!_setjmp(scheduler)) {
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    getcontext(&first_context);
    first_context.uc_stack.ss_sp = stacks + (&fiber - fibers) * STACK_BYTES;
    first_context.uc_stack.ss_size = STACK_BYTES;
    first_context.uc_link = nullptr;
    makecontext(&first_context, run_fiber, 0);
    swapcontext(&scheduler_context, &first_context);
  }
  running = nullptr;
}

// The numbers below `count` in this launch's order.
void arrange(uint32_t* numbers, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) numbers[i] = launch->order == 1 ? count - 1 - i : i;
  if (launch->order < 2) return;
  for (uint32_t i = count; i > 1; --i) {
    random_state = random_state * 1664525u + 1013904223u;
    const uint32_t other = (random_state >> 8) % i;
    const uint32_t kept = numbers[i - 1];
    numbers[i - 1] = numbers[other];
    numbers[other] = kept;
  }
}

// Runs a SIMD group until no lane of it can go on.
void run_simd_group(unsigned number) {
  Fiber* lanes = fibers + number * LANES;
  const uint32_t count = num_threads - number * LANES < LANES ? num_threads - number * LANES : LANES;
  SimdGroup& group = simd_groups[number];
  for (;;) {
    uint32_t order[LANES];
    arrange(order, count);
    for (uint32_t i = 0; i < count; ++i)
      if (lanes[order[i]].state == READY) resume(lanes[order[i]]);
    group.active = 0;
    const Fiber* first = nullptr;
    int spaces = DEVICE | THREADGROUP;
    for (uint32_t lane = 0; lane < count; ++lane) {
      const Fiber& fiber = lanes[lane];
      if (fiber.state != AT_SIMD) continue;
      if (first && fiber.operation != first->operation)
        fault("lanes %u and %u of SIMD group %u wait at different SIMD operations",
              first->thread.index % LANES, lane, number);
      if (!first) first = &fiber;
      group.active |= 1u << lane;
      spaces &= fiber.spaces;
    }
    if (!first) return;
    if (first->operation == SIMD_BARRIER) {
      if (group.active != (count == LANES ? ~0u : (1u << count) - 1))
        fault("simdgroup_barrier is reached by some lanes of SIMD group %u only", number);
      memory_order_simd(spaces, number);
    }
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < MOST_VALUE_BYTES; ++i) group.met[lane][i] = group.given[lane][i];
    for (uint32_t lane = 0; lane < count; ++lane)
      if (group.active >> lane & 1) lanes[lane].state = READY;
  }
}

void run_group() {
  const unsigned num_simd_groups = (num_threads + LANES - 1) / LANES;
  for (uint32_t i = 0; i < num_threads; ++i) fibers[i].state = READY;
  for (;;) {
    uint32_t order[MOST_THREADS / LANES];
    arrange(order, num_simd_groups);
    for (unsigned i = 0; i < num_simd_groups; ++i) run_simd_group(order[i]);
    uint32_t waiting = 0;
    int spaces = DEVICE | THREADGROUP;
    for (uint32_t i = 0; i < num_threads; ++i)
      if (fibers[i].state == AT_BARRIER) ++waiting, spaces &= fibers[i].spaces;
    if (!waiting) return;
    if (waiting < num_threads)
      fault("threadgroup_barrier is reached by %u of %u threads", waiting, num_threads);
    memory_order(spaces);
    for (uint32_t i = 0; i < num_threads; ++i) fibers[i].state = READY;
  }
}

void place_threads(const uint32_t group[3]) {
  uint32_t size[3];
  num_threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const uint32_t left = launch->grid[axis] - group[axis] * launch->group[axis];
    size[axis] = left < launch->group[axis] ? left : launch->group[axis];
    num_threads *= size[axis];
  }
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = fibers[i].thread;
    const uint32_t at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int axis = 0; axis < 3; ++axis) {
      thread.in_group[axis] = at[axis];
      thread.group_in_grid[axis] = group[axis];
      thread.group_size[axis] = size[axis];
      thread.in_grid[axis] = group[axis] * launch->group[axis] + at[axis];
    }
    thread.index = i;
  }
}

}  // namespace

uint32_t num_group_threads() { return num_threads; }

bool on_stack(const char* address) {
  const char* own = stacks + (current - fibers) * STACK_BYTES;
  return running && address >= own && address < own + STACK_BYTES;
}

void barrier(int spaces) {
  current->state = AT_BARRIER;
  current->spaces = spaces;
  give_way();
}

Met meet(int operation, const void* value, unsigned size) {
  const unsigned lane = current->thread.index % LANES;
  SimdGroup& group = simd_groups[current->thread.index / LANES];
  for (unsigned i = 0; i < size; ++i) group.given[lane][i] = static_cast<const char*>(value)[i];
  current->state = AT_SIMD;
  current->operation = operation;
  give_way();
  return {group.met, group.active};
}

void simd_barrier(int spaces) {
  current->spaces = spaces;
  meet(SIMD_BARRIER, "", 0);
}

void fault(const char* format, ...) {
  char* text = output->fault;
  va_list values;
  va_start(values, format);
  int used = vsnprintf(text, FAULT_BYTES, format, values);
  va_end(values);
  if (running && used < FAULT_BYTES)
    snprintf(text + used, FAULT_BYTES - used, " (thread %u,%u,%u of threadgroup %u,%u,%u)",
             running->in_group[0], running->in_group[1], running->in_group[2],
             running->group_in_grid[0], running->group_in_grid[1], running->group_in_grid[2]);
  _longjmp(failed, 1);
}

// Runs a launch; its first fault ends it and is left in `fault`.
extern "C" void metal_launch(Launch* wanted) {
  static uint32_t* order;
  launch = output = wanted;
  running = nullptr;
  wanted->fault[0] = 0;
  random_state = wanted->order;
  stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) {
    snprintf(wanted->fault, FAULT_BYTES, "no memory for the threads' stacks");
    return;
  }
  for (Fiber& fiber : fibers) fiber.started = false;
  for (int i = 0; i < wanted->num_buffers; ++i) buffers[i] = wanted->buffers[i].begin;
  uint32_t groups[3];
  for (int axis = 0; axis < 3; ++axis)
    groups[axis] = (wanted->grid[axis] + wanted->group[axis] - 1) / wanted->group[axis];
  const uint32_t count = groups[0] * groups[1] * groups[2];
  order = static_cast<uint32_t*>(malloc(count * sizeof *order));
  if (!_setjmp(failed)) {
    arrange(order, count);
    memory_begin_launch();
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t at = order[i];
      const uint32_t group[3] = {at % groups[0], at / groups[0] % groups[1],
                                 at / groups[0] / groups[1]};
      place_threads(group);
      memory_begin_group();
      run_group();
    }
  }
  running = nullptr;
  free(order);
  munmap(stacks, MOST_THREADS * STACK_BYTES);
}
