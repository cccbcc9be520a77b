"""Each operation is tried on the CPU at hand; one that does not work there is not used there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from families import build
from pippin.backends.mlx.cpu.operations import bindings, check
from pippin.backends.mlx.cpu.operations.bindings import Operations, operations
from pippin.backends.mlx.load import prepare
from reference import assert_right
from serving import make_client, make_prompt

NAMES = [trial.__name__ for trial in check.TRIALS]
# A KV table is tried with what reads it.
ADDED_TO_GRAPHS = {name.removeprefix("pippin_") for name in bindings._NUMBERS} - {"kv_table"}


def test_every_operation_of_the_library_has_a_trial() -> None:
    assert set(NAMES) == ADDED_TO_GRAPHS


@pytest.mark.parametrize("trial", check.TRIALS, ids=NAMES)
def test_it_works_here(ours: Operations, trial: Callable[[Operations], check.Pairs]) -> None:
    assert check.error_of(trial, ours) is None


class Broken:
    """One operation of which computes something else."""

    def __init__(self, ours: Operations, name: str) -> None:
        self._ours = ours
        self._name = name

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._ours, name)
        if name != self._name:
            return right
        return lambda *args, **options: _changed(right(*args, **options))


def _changed(results: Any) -> Any:
    if isinstance(results, mx.array):
        if results.dtype == mx.int32:  # tokens
            return mx.zeros_like(results)
        return results + 0.01 * (mx.arange(results.shape[-1]) == 1)
    return type(results)(map(_changed, results))


@pytest.mark.parametrize("trial", check.TRIALS, ids=NAMES)
def test_what_computes_something_else_is_noticed(
    ours: Operations, trial: Callable[[Operations], check.Pairs]
) -> None:
    broken: Any = Broken(ours, trial.__name__)
    assert check.error_of(trial, broken) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_served_without_one_of_them(
    ours: Operations, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx's own stands in its place; the others stay."""
    monkeypatch.setattr(ours, "left_out", frozenset([name]))

    def refused(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} was left out")

    monkeypatch.setattr(ours, name, refused)
    assert operations(name) is None
    assert operations() is ours
    assert operations(*set(NAMES) - {name}) is ours
    client = make_client("qwen3_5", cache=False, num_slots=2, model=prepare(*build("qwen3_5")))
    prompt = make_prompt("qwen3_5", 70, seed=0)
    reply = client.ask(prompt, max_tokens=3, temperature=0.0)
    assert_right("qwen3_5", prompt, reply.tokens)
