"""The check for GPUs, as far as a CPU can run it: a failure on a GPU machine is harder to fix."""

from __future__ import annotations

import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

sys.path.append(str(Path(__file__).parents[3] / "tools"))

from torch_gpu import mixed, moe, packed, plays, races, right, tails

from chunk_words import capture_chunks
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel
from pippin.backends.torch.models.packed import Packed, dense
from pippin.backends.torch.pools.arena import Arena
from pippin.backends.torch.step.words import room
from pippin.types import GRID
from run_again import RunAgain
from torch_serving import load_torch

pytestmark = pytest.mark.slow
FEW_LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2}
SHALLOW = right.TINY | {"text_config": right.TINY["text_config"] | FEW_LAYERS}
SMALL = right.TINY | {"text_config": SHALLOW["text_config"] | {"vocab_size": 300}}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has done everything when a call returns."""
    if torch.cuda.is_available():
        pytest.skip("python tools/torch_gpu_check.py runs all of it here")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(races, "NUM_SCHEDULES", 2)
    monkeypatch.setattr(races, "NUM_REPEATS", 2)
    monkeypatch.setattr(races, "TINY", SHALLOW)


@pytest.mark.usefixtures("no_gpu")
def test_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.inference_mode():
        races.races()
    assert "kept other bits, though they said the same: none" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_a_schedule_that_differs_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States are written in place although the tree holds them: what was kept is read later."""
    is_shared = Arena.is_shared
    monkeypatch.setattr(
        Arena, "is_shared", lambda self, slabs: is_shared(self, slabs) & (slabs == 0)
    )
    with torch.inference_mode(), pytest.raises(AssertionError, match="launched ahead"):
        races.races()
    found = "1 steps ahead: 2 of 2 say what another run with waits said, 0 keep the same bits"
    assert found in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_ways_to_compute_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"kernels": False}
    monkeypatch.setattr(right, "WAYS", (("cpu, plain", "cpu", plain), ("again", "cpu", plain)))
    monkeypatch.setattr(right, "SHAPE", SMALL)
    monkeypatch.setattr(right, "CONTEXT", GRID + 3)
    monkeypatch.setattr(right, "NUM_STEPS", 4)
    with torch.inference_mode():
        right.correct()
    said = capsys.readouterr().out
    assert said.count("again: same") == 6
    assert "DIFFERS" not in said


@pytest.fixture
def plain_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections of `moe.py` on a CPU, where nothing is a kernel."""
    monkeypatch.setattr(moe, "DEVICE", "cpu")
    monkeypatch.setattr(moe, "HALF", torch.float32)

    def plain(loaded: LoadedModel, **options: Any) -> TorchBackend:
        return TorchBackend(loaded, **options | {"kernels": False})

    monkeypatch.setattr(moe, "TorchBackend", plain)


@pytest.mark.usefixtures("no_gpu", "plain_experts")
def test_experts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.inference_mode():
        moe.deterministic("attention", moe.ATTENTION_MOE)
    assert capsys.readouterr().out.count("--deterministic is the same to the bit") == 1


def test_captured_chunks_are_compared_with_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say otherwise are shown, and so are none."""
    launched, captured = (
        TorchBackend(load_torch("qwen3_5"), num_slots=5, kernels=False) for _ in range(2)
    )
    recorder = RunAgain()
    graphs = capture_chunks(captured, recorder)
    with torch.inference_mode():
        for size in (room(128, 4), room(64, 16)):
            mixed.compare(launched, captured, size, "float32")
    assert recorder.num_replays == 2 * 3 * 2
    run = graphs.run

    def shift(room: Any, words: Any, choice: Any) -> Any:
        words[0] += 1  # another token at the beginning
        return run(room, words, choice)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(graphs, "run", shift)
        with pytest.raises(AssertionError, match=r"captured .* launched"):
            mixed.compare(launched, captured, room(64, 16), "float32")
    graphs.refused.add(room(64, 4).kind)
    with torch.inference_mode(), pytest.raises(AssertionError, match="CHUNK_GRAPHS = False"):
        mixed.compare(launched, captured, room(64, 4), "float32")


@pytest.mark.usefixtures("no_gpu")
def test_first_requests_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"NUM_SLOTS": 4, "NUM_ROUNDS": 2, "LONGEST": 40, "MOST_EXTRA_MS": math.inf}
    firsts = tails.Firsts()
    changed = {
        "watched_firsts": lambda: nullcontext(firsts),
        "random_model": lambda: plays.make_model(SHALLOW, torch.float32, "cpu"),
    }
    for name, value in (small | changed).items():
        monkeypatch.setattr(tails, name, value)
    with torch.inference_mode():
        tails.tails()
        firsts.captured.append(0.01)
        with pytest.raises(AssertionError, match="captured while requests ran"):
            tails.tails()
    said = capsys.readouterr().out
    assert "2 rounds, 0 drafts: 0 kernels compiled, 0 captures" in said
    drafted = re.findall(r"2 rounds, ([\d,]+) drafts: 0 kernels compiled, 0 captures", said)
    assert len(drafted) == 2
    assert drafted[1] != "0"


def test_a_quantized_model_is_the_random_one_but_for_rounding() -> None:
    """What its speed is compared with: the same weights, a quarter of the bytes and scales."""
    few, whole = (
        make(SMALL, torch.float32, "cpu").decoder
        for make in (packed.quantized_model, plays.make_model)
    )
    assert few.nbytes < 0.25 * whole.nbytes
    for mine, theirs in zip(few.layers, whole.layers, strict=True):
        weight, expected = mine.mixer.out.weight, theirs.mixer.out.weight
        assert isinstance(weight, Packed)
        assert float((dense(weight) - expected).norm() / expected.norm()) < 0.12
