"""`pippin bench serve`, and the benchmarks of tools/bench/ as commands."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pippin import cli
from pippin.bench.client import Load, RequestSizes
from pippin.bench.report import Report, number
from processes import environment

TOOLS = Path(__file__).parents[2] / "tools" / "bench"


def run_tool(name: str, *argv: str) -> int:
    """The exit status of `python tools/bench/NAME.py ARGV`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *argv])
        with pytest.raises(SystemExit) as exited:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
    assert isinstance(exited.value.code, int)
    return exited.value.code


@pytest.mark.parametrize(
    ("argv", "loads"),
    [
        (["--concurrency", "1,4,32"], [Load(1), Load(4), Load(32)]),
        (["--concurrency", "1,4", "32"], [Load(1), Load(4), Load(32)]),
        (["--rate", "0.5,2"], [Load(rate=0.5), Load(rate=2.0)]),
        ([], [Load(1), Load(4), Load(16)]),
    ],
)
def test_rates_and_concurrencies_become_loads(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], loads: list[Load]
) -> None:
    seen: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Report:
        seen.extend(args)
        return Report("test", [], {})

    monkeypatch.setattr("pippin.bench.serve.measure_server", record)
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", "serve", "--url", "http://x", "--requests", "7", *argv])
    assert exited.value.code == 0
    assert seen == ["http://x", loads, RequestSizes(7, 512, 64)]


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("one_batch", ["--batch", "1,3", "--input", "40", "--output", "16", "--repeats", "1"]),
        ("speculate", ["--rows", "1,3", "--output", "24", "--pairs", "1"]),
    ],
)
def test_every_offline_benchmark_prints_what_it_measured(
    tmp_path: Path, name: str, argv: list[str]
) -> None:
    table, numbers = tmp_path / "table.md", tmp_path / "numbers.json"
    outputs = ["--markdown", str(table), "--json", str(numbers)]
    assert run_tool(name, *argv, "--backend", "fake", *outputs) == 0
    data = json.loads(numbers.read_text())
    measured = {
        "one_batch": lambda: [
            number(timing["decode_tokens_per_second"]) for timing in data["timings"]
        ],
        "speculate": lambda: [
            f"{row['ratio']:.3f}x"
            for part in ("oracle", "edits", "new", "mtp")
            for row in data[part]
            if row["rows"] in (1, 3)
        ],
    }[name]()
    assert measured
    assert all(f"| {value} |" in table.read_text() for value in measured)


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name, argv, message in [
        ("one_batch", ["--batch", "1,x"], "--batch"),
        ("one_batch", ["--no-prefix-cache"], "--no-prefix-cache"),
        ("speculate", ["--backend", "fake", "--only", "depth"], "no part 'depth'"),
        ("prefix", ["--cache-dir", "x"], "Unknown option: --cache-dir"),
        ("speculate", ["--backend", "fake", "--pairs", "0"], "--pairs. Must be > 0"),
        ("churn", ["--clients", "3", "--rate", "1"], "exclude each other"),
        ("churn", ["--seconds", "0"], "--seconds. Must be > 0"),
        ("churn", ["--url", "http://x", "--memory", "0.5"], "remove --step-log and options of"),
        ("compare", ["--only", "decode-5"], "no scenario 'decode-5'; there are prefill"),
        ("streams", ["--only", "chats"], "'chats' is no dialect: use chat, "),
        ("prefix", ["--only", "restart"], "no part 'restart'; there are repeat, chat, fan-out"),
    ]:
        assert run_tool(name, *argv) in (1, 2)
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--requests", "0"], "--requests. Must be > 0"),
        (["serve", "--concurrency", "4,0"], "--concurrency. Must be > 0"),
    ],
)
def test_a_mistake_of_pippin_bench_is_named(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", *argv])
    assert exited.value.code in (1, 2)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_of_other_commands_does_not_import_the_benchmarks() -> None:
    probe = (
        "import sys\nfrom pippin import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.startswith(('pippin.bench', 'pippin.bench.serve'))])"
    )
    out = subprocess.check_output([sys.executable, "-c", probe], env=environment(), text=True)
    assert "bench" in out
    assert out.strip().endswith("[]")
