"""Tests draw the same numbers each time and keep out of each other's way and the user's
directories.

`pytest --hypothesis-profile=explore` draws new examples instead.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings

from processes import BUILT

# What is imported and collected stays: to look through it for garbage costs seconds and finds none.
gc.disable()

WHOLLY_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)
LONGEST_FILES = (
    *("test_draft_contract", "test_mlx_families"),
    *("test_any_split", "test_worlds", "test_packed_attention", "test_prefix_reuse", "test_depth"),
    *("test_distributions", "test_serve", "test_every_family", "test_speculation"),
    *("test_torch_gpu_check", "test_page_chat", "test_page_engine", "test_shared_prefix"),
    *("test_openapi", "test_proving", "test_worked_examples", "test_pressure", "test_row_bytes"),
    *("test_speculated_replies", "test_structured_output", "test_preemption", "test_crashes"),
    *("test_bench_serving", "test_random_operations", "test_run_model"),
    *("test_documented_commands", "test_supervisor", "test_mlx_lm_package", "test_served_disk"),
    *("test_malformed", "test_ollama_downloads", "test_connections", "test_bench_commands"),
    *("test_hostile_grammars", "test_bench_compare", "test_random_tiers", "test_plain_drafts"),
    *("test_torch_families", "test_costs", "test_pace_explores"),
)

settings.register_profile("repeat", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeat")

try:
    import torch  # before mlx: a BLAS that mlx was given would stand in its way
except ImportError:
    pass
else:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # before anything imports triton
        os.environ["TRITON_INTERPRET"] = "1"
# The models here are small, and several processes that each use every core stand in each other's
# way.
for library in ("OPENBLAS", "OMP"):  # the second: torch, in processes that tests start
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# Every client of HTTP first reads all certificates there are, which takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)
# httpx gives up after five seconds; a machine that has much else to do may take longer.
for part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, part, 120.0)
# GPUs may round float32 products to ten bits: no tolerance here allows for that.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Stock mlx-lm, which ours is compared with, would have g++ build its kernels one by one.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")


@pytest.fixture(autouse=True, scope="session")
def user_directories_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All but the operations that are built for the CPU at hand."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cache", "config"):
            directory = tmp_path_factory.mktemp(kind)
            patch.setenv(f"XDG_{kind.upper()}_HOME", str(directory))
            if kind == "cache":
                BUILT.mkdir(exist_ok=True)
                (directory / "pippin").mkdir()
                (directory / "pippin" / "kernels").symlink_to(BUILT)
                build_operations()
        yield


def build_operations() -> None:
    """By one worker; the others, and the processes that tests start, find them built."""
    with (BUILT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        from pippin.backends.mlx.cpu.operations import find_operations  # and so mlx

        built = find_operations().module
    is_ours = built is None or Path(built.__file__).parent.samefile(BUILT)
    assert is_ours, "collecting tests has built some"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Without a seed mlx takes one from the clock."""
    import mlx.core as mx  # reads the environment set above

    mx.random.seed(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are slow as a whole are not imported for `make quick` either."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return WHOLLY_SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_collection_finish() -> None:
    """From here on there is garbage, and only what tests make is looked through for it."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest go first, so that no worker is left alone with one at the end.

    xdist sorts by the number of tests instead unless it hears `--no-loadscope-reorder`.
    """
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
