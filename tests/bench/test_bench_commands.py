"""`pippin bench` on the command line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pippin import cli
from pippin.bench.report import Report
from pippin.config import Config, EngineConfig, ModelConfig
from processes import environment

EMPTY = Report("test", [], [], {})


def called_with(monkeypatch: pytest.MonkeyPatch, where: str, *argv: str) -> tuple[Any, ...]:
    """The arguments that `pippin bench ARGV` calls a benchmark with."""
    seen: list[tuple[Any, ...]] = []

    def record(*args: Any, **kwargs: Any) -> Report:
        seen.append((*args, kwargs))
        return EMPTY

    monkeypatch.setattr(where, record)
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", *argv])
    assert exited.value.code == 0
    return seen[0]


@pytest.mark.parametrize("sizes", [["1,4,32"], ["1", "4", "32"], ["1,4", "32"]])
def test_lists_take_commas_or_spaces(monkeypatch: pytest.MonkeyPatch, sizes: list[str]) -> None:
    argv = ["one-batch", "--max-running", "3", "--backend", "fake", "--batch", *sizes]
    config, options = called_with(monkeypatch, "pippin.bench.one_batch.one_batch", *argv)
    assert config == Config(ModelConfig(backend="fake"), EngineConfig(max_running=3))
    assert options == {"batches": [1, 4, 32], "input_len": 512, "output_len": 64, "repeats": 3}


def test_rates_and_concurrencies_become_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["serve", "--url", "http://x", "--rate", "0.5,2", "--requests", "7", "--streams", "4"]
    url, loads, options = called_with(monkeypatch, "pippin.bench.serve.serve", *argv)
    assert url == "http://x"
    assert [(load.kind, load.level, load.num_requests) for load in loads] == [
        ("rate", 0.5, 7),
        ("rate", 2.0, 7),
    ]
    assert options["num_streams"] == 4


def test_server_options_pass_through_as_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["compare", "--only", "decode", "--mlx-lm-options", "--prompt-cache-size 64"]
    model_dir, options = called_with(monkeypatch, "pippin.bench.compare.compare", *argv)
    assert model_dir.name == "stories-hybrid-20m"
    assert options["only"] == ["decode"]
    assert options["mlx_lm_options"] == ["--prompt-cache-size", "64"]


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in [
        (["one-batch", "--batch", "1,x"], "--batch"),
        (["growht"], 'Did you mean "growth"?'),
        (["growth", "--only", "depth"], "no part 'depth'"),
    ]:
        with pytest.raises(SystemExit) as exited:
            cli.main(["bench", *argv])
        assert exited.value.code in (1, 2)
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_of_other_commands_does_not_import_the_benchmarks() -> None:
    probe = (
        "import sys\nfrom pippin import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.startswith(('pippin.bench', 'pippin.cli_b'))])"
    )
    out = subprocess.check_output([sys.executable, "-c", probe], env=environment(), text=True)
    assert "bench" in out
    assert out.strip().endswith("[]")
