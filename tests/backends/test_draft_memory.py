"""Drafts take few bytes, or at most three hundredths of a row's, on either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundled import BUNDLED_PATH
from pippin.backends.mlx.backend import MLXBackend, draft_bytes
from pippin.backends.step.drafts import FEW_BYTES, MOST_SHARE, ROW_TOKENS, affordable_depth
from processes import is_installed

OPTIONS: dict[str, Any] = {"num_slots": 4, "dtype": "float32", "mtp": True}


def test_as_many_drafts_as_their_share_of_a_row_pays() -> None:
    def depth(of_each: int, fixed: int = 0) -> int:
        row = 1000 * FEW_BYTES
        each, always = of_each * row // 10_000, fixed * row // 10_000
        return affordable_depth(6, lambda number: always + number * each, lambda _: row)

    assert [depth(0), depth(50), depth(51), depth(100), depth(100, 60)] == [6, 6, 5, 3, 2]
    assert depth(400) == 1


def test_what_takes_few_bytes_is_not_counted_against_a_small_row() -> None:
    def depth(of_each: int) -> int:
        return affordable_depth(6, lambda number: number * of_each, lambda _: 10_000)

    assert [depth(FEW_BYTES // 6), depth(FEW_BYTES // 5), depth(FEW_BYTES + 1)] == [6, 5, 1]
    assert affordable_depth(0, lambda _: 0, lambda _: 10_000) == 0


def test_a_row_of_the_bundled_model_on_mlx() -> None:
    backend = MLXBackend.load(BUNDLED_PATH, max_depth=6, **OPTIONS)
    without = MLXBackend(backend.loaded, num_slots=4)
    own, rest = (each.row_bytes(ROW_TOKENS) for each in (backend, without))
    assert backend.max_depth == backend.drafts_itself == 6
    assert 0 < own - rest == draft_bytes(backend.loaded, 6) <= FEW_BYTES


@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_a_row_of_the_bundled_model_on_torch(caplog: pytest.LogCaptureFixture) -> None:
    from pippin.backends.torch.backend import TorchBackend

    caplog.set_level("INFO")
    backend = TorchBackend.load(BUNDLED_PATH, max_depth=6, **OPTIONS)
    backend.limit_memory(1 << 30)
    most = max(FEW_BYTES, MOST_SHARE * backend.row_bytes(ROW_TOKENS))
    assert 0 < backend.memory_parts()["other"] <= OPTIONS["num_slots"] * most
    assert f"at most {backend.max_depth} drafts of a request are verified" in caplog.text


@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_models_without_recurrent_states_have_all_drafts() -> None:
    from pippin.backends.torch.backend import TorchBackend
    from torch_families import checkpoint

    path: Path = checkpoint("qwen3")
    assert TorchBackend.load(path, max_depth=6, **OPTIONS).max_depth == 6
