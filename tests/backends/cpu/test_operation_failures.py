"""What goes wrong in an operation reaches Python: no deadlock, no lost process, no stray memory."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.cpu.operations.library import SOURCE
from processes import run_python

# A program for the headers alone: the first line that fails is printed.
CHECKS = """
#include <cstdio>
#include <cstdlib>
#define EXPECT(what) if (!(what)) { std::printf("line %d: %s\\n", __LINE__, #what); std::_Exit(1); }
"""

POOL = """
#include <set>
#include <stdexcept>
#include <string>
#include "pool.h"

// Blocks that take a while, so that every thread gets some.
std::string thrown_by(long bad, bool only_others) {
  const auto caller = std::this_thread::get_id();
  try {
    Pool::shared().run(64, 1, [&](long from, long) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const bool other = std::this_thread::get_id() != caller;
      const bool fails = only_others ? other : from == bad;
      if (fails) throw std::runtime_error("block " + std::to_string(from));
    });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

long sum_of(long count) {
  std::atomic<long> sum{0};
  Pool::shared().run(count, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) sum += i;
  });
  return sum;
}

int main() {
  Pool::start(4);
  for (int i = 0; i < 20; i++) {
    EXPECT(thrown_by(i, false) == "block " + std::to_string(i));
    EXPECT(thrown_by(0, true).starts_with("block "));  // in a thread that is not the caller's
    EXPECT(thrown_by(-1, false) == "nothing");
    EXPECT(sum_of(1000) == 499500);
  }
  std::_Exit(0);
}
"""

SCRATCH = """
#include <cstdint>
#include <new>
#include "scratch.h"

bool is_refused(long count) {
  try {
    Scratch room(count);
    return false;
  } catch (const std::bad_alloc&) {
    return true;
  }
}

int main() {
  Scratch first(10);
  EXPECT(is_refused(long(1) << 58));
  Scratch second(20);
  EXPECT(is_refused(long(1) << 58));
  first[9] = 1.0f;
  second[19] = 2.0f;
  EXPECT(first.get() != second.get());
  { Scratch third(5); EXPECT(third.get() != second.get()); third[4] = 3.0f; }
  EXPECT(first[9] == 1.0f && second[19] == 2.0f);
}
"""


def run_program(directory: Path, text: str, *options: str) -> None:
    source, program = directory / "program.cpp", directory / "program"
    source.write_text(CHECKS + text)
    flags = ("-std=c++20", "-O1", "-pthread", f"-I{SOURCE.parent}")
    built = subprocess.run(
        ["g++", *flags, str(source), "-o", str(program), *options], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.usefixtures("ours")
def test_an_exception_in_any_thread_is_the_caller_s_and_the_pool_goes_on(tmp_path: Path) -> None:
    run_program(tmp_path, POOL)


@pytest.mark.usefixtures("ours")
def test_memory_that_is_refused_is_an_exception(tmp_path: Path) -> None:
    run_program(tmp_path, SCRATCH)


FAILS = """
import mlx.core as mx
from pippin.backends.mlx.cpu.operations.bindings import check_operations, operations
ours = operations()
one = mx.ones((1, 1, 1, 16))
endless = mx.broadcast_to(one, (1, 1 << 16, 1 << 30, 16))  # more than any process can address
y = ours.attention(one, endless, endless, 1.0, None, causal=False)
print(mx.isnan(y).all().item())
try:
    check_operations()
except RuntimeError as error:
    print(error)
check_operations()  # it was told once
print(ours.attention(one, one, one, 1.0, None, causal=False).sum().item())
"""


@pytest.mark.usefixtures("ours")
def test_an_operation_that_fails_in_mlx_s_thread_is_an_error_of_the_step() -> None:
    is_nan, error, after = run_python(FAILS).splitlines()
    assert (is_nan, after) == ("True", "16.0")
    assert error.startswith("a CPU operation of Pippin's failed: AttentionOfChunk: std::")
    assert "--safe" in error


HEAD, DIRECT, READY = 16, 4, 2  # bytes of an object's head; nanobind's bits


def pretend_object(array: mx.array, bits: int) -> ctypes.Array[ctypes.c_char]:
    """An object as nanobind lays it out, in which the address of the array lies."""
    offset = ctypes.c_int32.from_address(id(array) + HEAD).value
    words = [0, 0, 24 | bits << 32, id(array) + offset]
    return ctypes.create_string_buffer(np.array(words, np.uint64).tobytes())


def test_an_array_that_an_object_points_to_is_found(ours: Operations) -> None:
    x = mx.arange(6.0).reshape(2, 3)
    mx.eval(x)
    buffer = np.asarray(x).ctypes.data

    def is_found(bits: int) -> bool:
        found = pretend_object(x, bits)
        address = ctypes.addressof(found)
        return bool(ours._library.pippin_is_array(address, buffer, x.size, x.shape[-1]))

    own_bits = ctypes.c_uint32.from_address(id(x) + HEAD + 4).value
    assert own_bits & DIRECT  # as mlx's arrays are
    assert is_found(READY)
    assert not is_found(0)  # not made yet


def test_an_object_that_is_not_ready_is_refused(ours: Operations) -> None:
    x, blank = mx.ones(4), mx.array(0.0)
    given = pretend_object(x, 0)
    made, inputs = (ctypes.c_void_p * 1)(id(blank)), (ctypes.c_void_p * 1)(ctypes.addressof(given))
    assert ours._library.pippin_rms_norm(made, 1, inputs, 1, 1e-5)
