"""python -m pippin.backends.mlx.cpu.operations.check LIBRARY: does it work with the mlx at hand?

If not it may well crash, so nobody else asks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cpu.operations.calls import LinearLayers, LinearWeights, Operations

TOLERANCE = 1e-5
DOES_NOT_FIT = 3  # as an exit status: no traceback has it


def finds_arrays(operations: Operations) -> bool:
    """Arrays as they come: made by Python, by an operation, of a view."""
    made = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    arrays = [made, made + 1.0, mx.array([1.0, 2.0]), mx.split(made, 2, axis=0)[0]]
    mx.eval(arrays)
    return all(operations.is_array(x, np.asarray(x).ctypes.data) for x in arrays)


def computes(operations: Operations) -> bool:
    """In a graph, and compiled: a node of one output, and one of several."""
    x = mx.random.normal((3, 2, 8))
    weight = mx.random.normal((8,))
    ours = operations.rms_norm(x * 2.0, weight, 1e-5) + 1.0
    if not _are_close(ours, mx.fast.rms_norm(x * 2.0, weight, 1e-5) + 1.0):
        return False
    weights = mx.random.normal((40, 8))
    layer = LinearLayers([LinearWeights(operations.pack(weights), None, len(weights))])
    if not _are_close(operations.linear(x, layer)[0], x @ weights.T):
        return False
    step = mx.compile(lambda a: operations.gated_delta(a, a, a, g, g, state, num_states=2))
    a, g, state = mx.random.normal((1, 65, 2, 4)), mx.ones((1, 65, 2)), mx.zeros((1, 2, 4, 4))
    y, states = step(a * 0.1)
    again, _ = step(a * 0.1)
    first = _first_read(a[:, 0] * 0.1)
    return _are_close(y[:, 0], first) and _are_close(y, again + 0 * states[1].sum())


def _first_read(x: mx.array) -> mx.array:
    """What is read after one token, of gates and betas of one: v (k . q)."""
    return x * (x * x).sum(axis=-1, keepdims=True)


def _are_close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, atol=TOLERANCE).item())


def main() -> int:
    mx.set_default_device(mx.Device(mx.cpu))
    operations = Operations(Path(sys.argv[1]))
    if not finds_arrays(operations):
        print("mlx's arrays are not where they are looked for", file=sys.stderr)
        return DOES_NOT_FIT
    if not computes(operations):
        print("the operations are off", file=sys.stderr)
        return DOES_NOT_FIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
