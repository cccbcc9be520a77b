"""`pippin bench` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pippin import cli
from pippin.bench.client.load import Load, RequestSizes
from pippin.bench.results.report import Report, number
from pippin.config import Config, EngineConfig, ModelConfig
from processes import environment

EMPTY = Report("test", [], {})


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
    config, options = called_with(monkeypatch, "pippin.bench.in_process.one_batch.one_batch", *argv)
    assert config == Config(ModelConfig(backend="fake"), EngineConfig(max_running=3))
    sizes_and_turns = {"batches": [1, 4, 32], "input_lens": (512,), "output_len": 64, "repeats": 3}
    assert options == sizes_and_turns | {"wants_ceilings": True}


def test_an_option_that_one_batch_would_ignore_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", "one-batch", "--backend", "fake", "--no-prefix-cache"])
    assert exited.value.code != 0
    captured = capsys.readouterr()
    assert "--no-prefix-cache" in captured.out + captured.err


def test_rates_and_concurrencies_become_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["serve", "--url", "http://x", "--rate", "0.5,2", "--requests", "7"]
    argv += ["--watchers", "10"]
    url, loads, sizes, options = called_with(
        monkeypatch, "pippin.bench.served.serving.measure_server", *argv
    )
    assert url == "http://x"
    assert loads == [Load(rate=0.5), Load(rate=2.0)]
    assert sizes == RequestSizes(7, 512, 64)
    assert options["num_watchers"] == 10


def test_server_options_pass_through_as_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["compare", "--only", "decode", "--their-options", "--prompt-cache-size 64"]
    model_dir, options = called_with(monkeypatch, "pippin.bench.served.compare.compare", *argv)
    assert model_dir.name == "stories-hybrid-20m"
    assert options["only"] == ["decode"]
    assert options["their_options"] == ["--prompt-cache-size", "64"]
    assert options["bundled"]
    assert options["backend"] == "mlx"


def test_another_model_is_compared_without_the_bundled_one_s_targets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    argv = ["compare", "--model", str(tmp_path), "--no-float32"]
    model_dir, options = called_with(monkeypatch, "pippin.bench.served.compare.compare", *argv)
    assert model_dir == tmp_path
    assert (options["bundled"], options["float32"]) == (False, False)


def test_churn_comes_from_clients_or_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "pippin.bench.churn.churn.churn"
    config, model_dir, load, options = called_with(monkeypatch, where, "churn", "--memory", "0.5")
    assert (config.engine.memory, model_dir.name) == ("0.5", "stories-hybrid-20m")
    assert (load, options) == (Load(12, seconds=60.0), {"seed": 0, "step_log": None})
    argv = ["churn", "--rate", "2", "--seconds", "9", "--seed", "4", "--step-log", "s"]
    _, _, load, options = called_with(monkeypatch, where, *argv)
    assert (load, options) == (Load(rate=2.0, seconds=9.0), {"seed": 4, "step_log": Path("s")})


def test_churn_at_a_url_asks_for_the_model_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["churn", "--url", "http://x", "--model", "theirs", "--clients", "3"]
    url, load, options = called_with(monkeypatch, "pippin.bench.churn.churn.churn_at", *argv)
    assert (url, load.num_clients, options["model"]) == ("http://x", 3, "theirs")


def test_prefix_and_features_take_parts_and_the_engine_s_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["prefix", "--only", "repeat,chat", "--rounds", "5", "--memory", "0.5"]
    config, model_dir, options = called_with(
        monkeypatch, "pippin.bench.served.prefix.prefix", *argv
    )
    assert config.engine.memory == "0.5"
    assert model_dir.name == "stories-hybrid-20m"
    assert options == {"only": ["repeat", "chat"], "rounds": 5}
    argv = ["features", "--streams", "16", "--output", "32", "--only", "overlap"]
    _, options = called_with(monkeypatch, "pippin.bench.in_process.features.features", *argv)
    sizes = {"num_streams": 16, "num_tokens": 32, "num_pairs": 12}
    assert options == {"only": ["overlap"], **sizes}


@pytest.mark.parametrize(
    "argv",
    [
        ["one-batch", "--batch", "1,3", "--input", "40", "--output", "16", "--repeats", "1"],
        ["features", "--only", "overlap", "--streams", "2", "--output", "16", "--pairs", "2"],
        ["growth", "--only", "requests"],
        ["speculate", "--rows", "1,3", "--output", "24", "--pairs", "1"],
    ],
)
def test_every_offline_benchmark_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str]
) -> None:
    monkeypatch.setattr("pippin.bench.in_process.growth.REQUESTS", (1, 4))
    table, numbers = tmp_path / "table.md", tmp_path / "numbers.json"
    outputs = ["--markdown", str(table), "--json", str(numbers)]
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", *argv, "--backend", "fake", *outputs])
    assert exited.value.code == 0
    data = json.loads(numbers.read_text())
    measured = {
        "one-batch": lambda: [
            number(timing["decode_tokens_per_second"]) for timing in data["timings"]
        ],
        "features": lambda: [f"{data['overlap']['tokens_per_second']['ratio']:.3f}x"],
        "growth": lambda: [number(y) for _, y in data["requests"]],
        "speculate": lambda: [
            f"{row['ratio']:.3f}x"
            for part in ("oracle", "edits", "new", "mtp")
            for row in data[part]
            if row["rows"] in (1, 3)
        ],
    }[argv[0]]()
    assert measured
    assert all(f"| {value} |" in table.read_text() for value in measured)


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in [
        (["one-batch", "--batch", "1,x"], "--batch"),
        (["growht"], 'Did you mean "growth"?'),
        (["growth", "--only", "depth"], "no part 'depth'"),
        (["speculate", "--backend", "fake", "--only", "depth"], "no part 'depth'"),
        (["features", "--no-overlap"], "Unknown option: --no-overlap"),
        (["prefix", "--no-prefix-cache"], "Unknown option: --no-prefix-cache"),
        (
            ["features", "--backend", "fake", "--streams", "1", "--only", "grammar"],
            "--streams must be at least 2 for grammar, got 1",
        ),
        (["features", "--backend", "fake", "--pairs", "0"], "--pairs. Must be > 0"),
        (["churn", "--clients", "3", "--rate", "1"], "exclude each other"),
        (["serve", "--requests", "0"], "--requests. Must be > 0"),
        (["serve", "--concurrency", "4,0"], "--concurrency. Must be > 0"),
        (["churn", "--seconds", "0"], "--seconds. Must be > 0"),
        (
            ["churn", "--url", "http://x", "--memory", "0.5"],
            "remove --step-log and options of the engine",
        ),
    ]:
        with pytest.raises(SystemExit) as exited:
            cli.main(["bench", *argv])
        assert exited.value.code in (1, 2)
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_of_other_commands_does_not_import_the_benchmarks() -> None:
    probe = (
        "import sys\nfrom pippin import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.startswith(('pippin.bench', 'pippin.cli.bench'))])"
    )
    out = subprocess.check_output([sys.executable, "-c", probe], env=environment(), text=True)
    assert "bench" in out
    assert out.strip().endswith("[]")
