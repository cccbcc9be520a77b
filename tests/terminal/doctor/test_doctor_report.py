"""`pippin doctor`: its checks, each of which can fail; devices; the page and the document."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import mlx.core as mx
import mlx.nn as nn
import pytest

from pippin import LLM, SamplingParams
from pippin.backends.base import DeviceInfo
from pippin.backends.mlx import device as devices
from pippin.backends.mlx import environment
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.blas import BlasReport
from pippin.backends.mlx.cpu.operations import OperationsReport
from pippin.config import BackendName, Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import load_backend
from pippin.errors import ConfigError, LoadError
from pippin.offline.llm import Completion
from pippin.startup import resolve as measured_gain
from pippin.startup.resolve import Gain, resolve
from pippin.terminal import doctor
from pippin.terminal.doctor import (
    SCHEMA,
    SCHEMA_VERSION,
    Examined,
    Finding,
    as_document,
    as_page,
    checked,
    machine,
    on_mlx,
    private,
    sections,
)
from pippin.terminal.doctor import engine as replies
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.on_mlx import decode_steps, products
from pippin.types import TokenLogprobs
from processes import environment as child_environment

INFO = Finding("memory", "8 GB", numbers={"memory_bytes": 8e9})
RIGHT = Finding("product", "error 0", "ok")
SLOW = Finding("BLAS", "the slow one", "warning", "products are slow", "install another")
WRONG = Finding("attention", "error 1", "wrong", "replies are wrong", "serve with --safe")


def examine(monkeypatch: pytest.MonkeyPatch, *findings: Finding | Exception) -> None:
    def look() -> Iterator[Finding]:
        for finding in findings:
            if isinstance(finding, Exception):
                raise finding
            yield finding

    monkeypatch.setattr(
        doctor, "sections", lambda *_, **__: iter([doctor.Section("kernels", "looking", look)])
    )


def validate(document: Any) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("findings", "status"), [((INFO, RIGHT), 0), ((RIGHT, SLOW), 0), ((RIGHT, WRONG), 1)]
)
def test_the_status_is_1_only_if_something_is_wrong(
    findings: tuple[Finding, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    examine(monkeypatch, *findings)
    assert doctor.run_doctor(Config(), as_json=True) == status
    printed = capsys.readouterr()
    document = json.loads(printed.out)  # nothing else is there
    validate(document)
    assert document["ok"] is (status == 0)
    assert "looking ..." in printed.err


def test_every_finding_is_on_the_page_with_what_it_means_and_what_to_do() -> None:
    page = as_page([Examined("kernels", 0.5, (INFO, RIGHT, SLOW, WRONG))], 1.0)
    assert "1 check failed, 1 warning, 1 check passed" in page.splitlines()[0]
    for finding in (INFO, RIGHT, SLOW, WRONG):
        assert f"{finding.name}: {finding.value}" in page
    for finding in (SLOW, WRONG):
        assert f"meaning: {finding.means}" in page
        assert f"what to do: {finding.remedy}" in page
    assert "all right" in as_page([Examined("kernels", 0.5, (INFO, RIGHT))], 1.0)


def test_the_schema_allows_what_is_written_and_nothing_else() -> None:
    document = as_document([Examined("kernels", 0.5, (INFO, RIGHT, SLOW, WRONG))], 1.0)
    validate(document)
    assert document["schema"] == SCHEMA_VERSION
    finding = ("sections", 0, "findings")
    for place, change in (
        ((), {"further": 1}),
        ((), {"schema": SCHEMA_VERSION + 1}),
        ((*finding, 3), {"remedy": None}),
        ((*finding, 1), {"means": "x"}),
        ((*finding, 0), {"level": "bad"}),
        ((*finding, 0), {"numbers": {"x": "1"}}),
        ((*finding, 0), {"name": ""}),
    ):
        changed = part = json.loads(json.dumps(document))
        for step in place:
            part = part[step]
        part.update(change)
        with pytest.raises(jsonschema.ValidationError):
            validate(changed)


def test_what_is_no_number_is_not_written_as_one() -> None:
    found = Finding("product", "error nan", "ok", numbers={"error": float("nan"), "limit": 0.5})
    document = as_document([Examined("kernels", 0.5, (found,))], 1.0)
    assert document["sections"][0]["findings"][0]["numbers"] == {"limit": 0.5}
    json.dumps(document, allow_nan=False)


def test_a_section_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examine(monkeypatch, RIGHT, RuntimeError("no such kernel"))
    assert doctor.run_doctor(Config(), as_json=False) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: no such kernel" in printed.out
    assert "--safe" in printed.out
    assert "Traceback" in printed.err
    examine(monkeypatch, LoadError("memory: the model uses 8 GB"))
    assert doctor.run_doctor(Config(), as_json=False) == 1
    assert "memory: the model uses 8 GB" in capsys.readouterr().out


def test_an_option_that_is_wrong_is_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    examine(monkeypatch, ConfigError("memory must be an amount"))
    with pytest.raises(ConfigError):
        doctor.run_doctor(Config(), as_json=False)


@pytest.mark.parametrize("words", [["--no-such-option"], ["--memory", "much"]])
def test_the_status_of_wrong_usage_is_2(words: list[str]) -> None:
    command = [sys.executable, "-m", "pippin", "doctor", *words]
    assert subprocess.run(command, env=child_environment(), capture_output=True).returncode == 2


def test_names_of_users_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/homes/ada"))
    assert private("at /srv/homes/ada/.venv/bin/python") == "at ~/.venv/bin/python"
    assert private("/srv/homes/adam/x") == "/srv/homes/adam/x"
    assert private("in '/Users/ada/Library/x': /home/bob") == "in '~/Library/x': ~"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert private("/usr/bin") == "/usr/bin"
    found = Finding("x", "/Users/ada/a", "wrong", "see /Users/ada/b", "delete /Users/ada/c")
    examined = [Examined("kernels", 0.5, (found,))]
    assert "ada" not in as_page(examined, 1.0) + json.dumps(as_document(examined, 1.0))


def test_what_is_off_says_what_it_means() -> None:
    with pytest.raises(AssertionError):
        Finding("x", "y", "wrong")
    with pytest.raises(AssertionError):
        Finding("x", "y", "ok", "means", "remedy")
    assert checked("x", "y", {}, ok=True, means="bad").means is None
    assert checked("x", "y", {}, ok=False, means="bad").level == "wrong"


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the smallest of the decode steps is timed, and replies are few and short."""
    monkeypatch.setattr(replies, "PROMPTS", replies.PROMPTS[:2])
    monkeypatch.setattr(replies, "REPLY_TOKENS", 6)
    monkeypatch.setattr(replies, "PARAMS", dataclasses.replace(replies.PARAMS, max_tokens=6))
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 0.0)


def report(
    capsys: pytest.CaptureFixture[str],
    backend: BackendName,
    engine: EngineConfig | None = None,
    *,
    status: int = 0,
) -> dict[str, dict[str, Any]]:
    """Findings by name, of each section by name."""
    config = Config(ModelConfig(backend=backend, dtype="float32"), engine or EngineConfig())
    found = doctor.run_doctor(config, as_json=True)
    printed = capsys.readouterr().out
    assert found == status, printed
    document = json.loads(printed)
    validate(document)
    return {
        section["name"]: {finding["name"]: finding for finding in section["findings"]}
        for section in document["sections"]
    }


@pytest.mark.usefixtures("few_steps")
def test_the_fake_backend(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "fake")
    assert list(found) == ["machine", "model", "choices", "batch", "steps"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


@pytest.mark.usefixtures("few_steps")
@pytest.mark.slow
def test_mlx_is_loaded_twice_and_never_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[bool] = []
    load = MLXBackend.load

    def counted(path: Path, **options: Any) -> MLXBackend:
        loads.append(options["safe"])
        logging.getLogger("pippin.backends").warning("rows are not packed: the kernel is off")
        return load(path, **options)

    monkeypatch.setattr(MLXBackend, "load", counted)
    found = report(capsys, "mlx")
    assert loads == [False, True]
    names = ["machine", "device", "launches", "kernels", "model", "choices", "batch", "steps"]
    assert list(found) == [*names, "plain", "drafts"]
    assert found["drafts"]["--speculate auto"]["value"] == "not timed: no time was left"
    assert {"attention", "decode steps", "type", "products"} <= set(found["choices"])
    assert set(found["steps"]["1 row"]["numbers"]) == {"64"}
    assert found["steps"]["16 rows"]["numbers"] == {}
    assert found["model"]["load warned"]["value"] == "rows are not packed: the kernel is off"
    assert found["plain"]["as served = --safe"]["level"] == "ok"


@pytest.mark.usefixtures("few_steps")
@pytest.mark.slow
def test_torch_with_safe(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    found = report(capsys, "torch", EngineConfig(safe=True))
    assert list(found) == ["machine", "device", "launches", "model", "choices", "batch", "steps"]
    assert "--safe" in found["choices"]["layers"]["value"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


@pytest.mark.usefixtures("few_steps")
def test_a_model_that_does_not_fit_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "mlx", EngineConfig(memory="1MB"), status=1)
    assert list(found)[-1] == "model"
    assert "of a budget of 1.0 MB" in found["model"]["model"]["value"]


def test_a_model_that_is_not_there_is_a_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = Config(ModelConfig(str(tmp_path / "absent")))
    assert doctor.run_doctor(config, as_json=False) == 1
    assert "absent" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured here decides for no other test."""
    monkeypatch.setattr(measured_gain, "user_cache_path", tmp_path.joinpath)


def test_recurrences_that_drift_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.level for found in on_mlx.recurrence()] == ["ok", "ok"]
    right = on_mlx.gated_delta_step

    def drifting(*args: mx.array) -> tuple[mx.array, mx.array]:
        y, state = right(*args)
        return y + 1e-3, state

    monkeypatch.setattr(on_mlx, "gated_delta_step", drifting)
    assert [found.level for found in on_mlx.recurrence()] == ["ok", "wrong"]


@pytest.mark.parametrize(("error", "with_tf32", "level"), [(1e-3, True, "ok"), (1e-3, 0, "wrong")])
def test_what_tf32_rounds_is_no_failure_where_serve_rounds_it(
    error: float, with_tf32: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_mlx, "on_cpu", lambda: False)
    monkeypatch.setenv(environment.TF32, "1" if with_tf32 else "0")
    monkeypatch.setattr(on_mlx, "relative_error", lambda *_: error)
    assert {found.level for found in on_mlx.recurrence()} == {level}


@pytest.mark.parametrize(("system", "level"), [("Linux", "warning"), ("Darwin", "info")])
def test_without_operations_the_report_says_why(
    system: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_mlx.platform, "system", lambda: system)
    found = on_mlx.operations(OperationsReport(reason="no g++ on PATH"))
    assert (found.value, found.level) == ("mlx's own: no g++ on PATH", level)
    assert ("apt install g++" in str(found.remedy)) == (level == "warning")
    assert "in C++" in on_mlx.operations(OperationsReport(module=object())).value


def completion(*tokens: int, second_best: int = 9, behind: float = 0.0) -> Completion:
    logprobs = [
        TokenLogprobs(-1.0, (token, second_best), (-1.0, -1.0 - behind)) for token in tokens
    ]
    return Completion([1], tokens=list(tokens), logprobs=logprobs)


@pytest.mark.parametrize(
    ("num_same", "other", "behind", "level"),
    [
        (24, 9, 5.0, "ok"),
        (20, 9, 0.001, "ok"),  # level: may fall either way
        (20, 9, 0.01, "wrong"),
        (20, 8, 0.0, "wrong"),  # not among the likeliest
        (10, 9, 0.0, "wrong"),  # too little was compared
    ],
)
def test_replies_may_part_only_between_tokens_that_are_level(
    num_same: int, other: int, behind: float, level: str
) -> None:
    first = completion(*[1] * 24, behind=behind)
    second = completion(*[1] * num_same, *[other] * (24 - num_same))
    found = replies.compared("x = y", [first] * 4, [second] * 4, 2e-3, means="different")
    assert found.level == level


def test_equal_tokens_with_other_probabilities_are_wrong() -> None:
    first, second = completion(*[1] * 24), completion(*[1] * 24)
    second.logprobs[3] = TokenLogprobs(-1.1, (1, 9), (-1.1, -2.0))
    found = replies.compared("x = y", [first] * 4, [second] * 4, 2e-3, means="different")
    assert (found.level, found.numbers["equal_tokens"]) == ("wrong", 96)


class TwoWays:
    """Stands in for an engine: what it replies as it is served, and with --safe."""

    margin = 2e-3

    def __init__(self, served: Completion, safe: Completion, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        self.llm = cast(LLM, Replies(served))
        self._safe = Replies(safe)

    def safe(self) -> AbstractContextManager[Replies]:
        return nullcontext(self._safe)


class Replies:
    def __init__(self, each: Completion) -> None:
        self._each = each

    def generate(self, prompts: Sequence[str], _: SamplingParams) -> list[Completion]:
        return [self._each for _ in prompts]


def test_a_kernel_that_is_wrong_in_the_model_is_found_and_safe_is_recommended() -> None:
    right, wrong = completion(*[1] * 24, behind=3.0), completion(*[9] * 24)
    (found,) = replies.plain(cast(Engine, TwoWays(right, right)))
    assert found.level == "ok"
    (found,) = replies.plain(cast(Engine, TwoWays(right, wrong)))
    assert found.level == "wrong"
    assert "--safe" in str(found.remedy)
    (found,) = replies.plain(cast(Engine, TwoWays(right, wrong, is_plain=True)))
    assert found.level == "info"


def test_the_report_says_whose_products_a_model_has() -> None:
    class Stacked(nn.Linear):
        """As layers of one input are made over on GPUs."""

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Stacked(64, 64))
    assert products(model) == "2 by mlx, 1 by mlx, one product for layers of one input"
    quantized = nn.Sequential(nn.Linear(64, 64).to_quantized(group_size=32))
    assert products(quantized) == "1 quantized, by mlx"
    assert products(nn.Sequential()) == "none"


@pytest.mark.parametrize(("off", "level"), [(1e-5, "ok"), (0.5, "wrong"), (None, "wrong")])
def test_each_kernel_of_torch_is_held_against_plain_operations(
    off: float | None, level: str
) -> None:
    pytest.importorskip("torch")
    from pippin.backends.torch.backend import TorchBackend
    from pippin.terminal.doctor.on_torch import choices

    class OnAGpu(TorchBackend):
        has_kernels, dtype = True, "bfloat16"
        device = DeviceInfo("cuda", "H200", 140 << 30, 0.85, prefill_tokens=8192)

        def __init__(self) -> None: ...

        def kernel_errors(self) -> Iterator[tuple[str, float | None, float]]:
            yield "chunks of prompts with attention", off, 0.1

    llm = SimpleNamespace(config=Config(), loop=SimpleNamespace(backend=OnAGpu()))
    *chosen, kernel = choices(cast(LLM, llm))
    assert chosen[0].value == "bfloat16: as the checkpoint is stored"
    assert chosen[1].value == "Triton kernels, captured as CUDA graphs"
    assert (kernel.name, kernel.level) == ("chunks of prompts with attention", level)
    assert level == "ok" or "--safe" in str(kernel.remedy)


@pytest.mark.parametrize(
    ("engine", "compiled", "said"),
    [
        (EngineConfig(), True, "compiled, as in pippin serve"),
        (EngineConfig(deterministic=True), False, "not compiled: --deterministic"),
        (EngineConfig(safe=True), False, "not compiled: --safe"),
    ],
)
def test_the_report_says_which_decode_steps_were_checked(
    engine: EngineConfig, compiled: bool, said: str
) -> None:
    assert decode_steps(Config(engine=engine), compiled=compiled) == said


@pytest.mark.parametrize(
    ("seconds", "wrong", "words", "level"),
    [
        ((2.0, 1.0), False, "2.00 times as fast, one request at a time, greedy: worth it", "ok"),
        ((1.0, 1.0), False, "1.00 times as fast, one request at a time, greedy: not worth", "ok"),
        ((2.0, 1.0), True, "2.00 times as fast", "wrong"),
    ],
)
def test_drafts_are_worth_what_they_were_timed_to_be(
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, float],
    wrong: bool,
    words: str,
    level: str,
) -> None:
    def reply(llm: LLM, *, speculate: bool) -> tuple[float, list[int]]:
        return seconds[speculate], [1, 2 + (wrong and speculate)]

    monkeypatch.setattr(replies, "timed_reply", reply)
    engine = Engine(Config(ModelConfig(backend="fake")))
    _, not_changed = replies.drafts(engine)
    pays = seconds == (2.0, 1.0) and not wrong
    assert f"not changed: by this it would be {'auto' if pays else 'off'}" in not_changed.value
    assert resolve(Config(ModelConfig(backend="fake"))).engine.speculate == "off"
    found, default = replies.drafts(engine, saves=True)
    assert found.value.startswith(words)
    assert found.level == level
    expected = "`pippin serve` uses --speculate auto" if pays else "off: `pippin serve` has no"
    assert default.value.startswith(expected)
    assert resolve(Config(ModelConfig(backend="fake"))).engine.speculate == (
        "auto" if pays else "off"
    )


def test_a_gain_that_cannot_be_kept_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gain: Gain) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(replies, "keep_gain", fail)
    engine = Engine(Config(ModelConfig(backend="fake")))
    _, default = replies.drafts(engine, saves=True)
    assert (default.level, default.value) == ("warning", "not kept: read-only")


def test_a_gain_with_a_draft_model_is_of_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Config(ModelConfig(backend="fake")))
    monkeypatch.setattr(Engine, "has_draft_model", True)
    (found,) = replies.drafts(engine)
    assert "with the draft model" in found.value


GIB = 1 << 30
MAC = {
    "device_name": "Apple M4 Max",
    "architecture": "applegpu_g16s",
    "max_buffer_length": 72 * GIB,
    "max_recommended_working_set_size": 96 * GIB,
    "memory_size": 128 * GIB,
    "resource_limit": 499_000,
}
# What mlx 0.32 tells of the virtual Mac (macos-15) on which workflows of GitHub run.
VIRTUAL_MAC = {
    "device_name": "Apple Paravirtual device",
    "architecture": "air64_v27",
    "max_buffer_length": 3_758_096_384,
    "max_recommended_working_set_size": 5_010_800_640,
    "memory_size": 7_516_192_768,
    "resource_limit": 499_000,
}
NAMES = (environment.TF32, environment.CUDA_GRAPHS, *environment.BUFFER_LIMITS)


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(mx, "device_info", lambda *_: MAC)
    for module in (devices, on_mlx):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
        monkeypatch.setattr(module, "on_metal", lambda: True)


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in on_mlx.device()}


@pytest.mark.usefixtures("on_a_mac")
def test_a_mac_s_limits_are_reported() -> None:
    findings = found()
    assert findings["device"].value == "metal: Apple M4 Max (applegpu_g16s)"
    assert findings["memory"].numbers["memory_bytes"] == 96 * GIB
    working_set = findings["Metal working set"]
    assert working_set.numbers == {"working_set_bytes": 96 * GIB, "total_bytes": 128 * GIB}
    assert "iogpu.wired_limit_mb" in working_set.value
    assert findings["Metal maxBufferLength"].numbers == {"buffer_bytes": 72 * GIB}
    assert findings["Metal buffers"].numbers == {"buffers": 249_500}
    assert "TF32" in findings
    assert "BLAS" not in findings


@pytest.mark.usefixtures("on_a_mac")
def test_a_virtual_mac_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda *_: VIRTUAL_MAC)
    findings = found()
    assert findings["device"].value == "metal: Apple Paravirtual device (air64_v27)"
    assert findings["Metal maxBufferLength"].value.startswith("3.8 GB")
    assert {finding.level for finding in findings.values()} == {"info"}
    assert devices.gpu_cores() > 0
    assert not devices.has_matrix_units()


@pytest.mark.usefixtures("on_a_mac")
def test_limits_that_mlx_does_not_tell_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {key: MAC[key] for key in ("device_name", "max_recommended_working_set_size")}
    monkeypatch.setattr(mx, "device_info", lambda *_: few)
    assert {"Metal maxBufferLength", "Metal buffers"}.isdisjoint(found())


@pytest.mark.usefixtures("on_a_mac")
def test_a_mac_without_metal_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (devices, on_mlx):
        monkeypatch.setattr(module, "on_cpu", lambda: True)
        monkeypatch.setattr(module, "on_metal", lambda: False)
    device = found()["device"]
    assert device.level == "warning"
    assert device.means is not None
    assert "Metal is not used" in device.means


@pytest.mark.usefixtures("on_a_mac")
def test_a_python_for_intel_is_wrong_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    def python() -> Finding:
        return next(f for f in machine(Config()) if f.name == "python")

    assert python().level == "info"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert python().level == "wrong"
    assert "Rosetta" in str(python().means)


def test_a_slow_blas_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = BlasReport("bundled with mlx", reason="scipy-openblas32 is not installed")
    monkeypatch.setattr(on_mlx, "load_fast_blas", lambda: slow)
    finding = on_mlx._blas()
    assert finding.level == "warning"
    assert "pippin[cpu]" in str(finding.remedy)


def test_only_options_that_were_given_are_printed() -> None:
    model, engine = ModelConfig(dtype="float16"), EngineConfig(safe=True, memory="6GB")
    options = {f.name: f.value for f in machine(Config(model, engine))}["options"]
    assert options == "--dtype float16 --memory 6GB --safe"
    assert {f.name: f.value for f in machine(Config())}["options"] == "defaults"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "on, the default of mlx, here and in pippin serve; --deterministic turns it off"),
        ("0", "off: MLX_ENABLE_TF32=0, here and in pippin serve"),
        ("1", "on: MLX_ENABLE_TF32=1, here and in pippin serve"),
    ],
)
@pytest.mark.usefixtures("nothing_set", "on_a_mac")
def test_the_report_says_whether_products_are_rounded(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(environment.TF32, value)
    assert found()["TF32"].value == said


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize(
    "engine", [EngineConfig(), EngineConfig(deterministic=True), EngineConfig(buffer_limit=200)]
)
def test_checks_run_with_the_environment_of_serve(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with what an engine with the same options sets before it loads a model."""
    config = Config(ModelConfig(backend="mlx"), engine)
    names = [section.name for section in sections(config, 0.0)]
    assert names[:4] == ["machine", "device", "launches", "kernels"]
    checked = settings()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(MLXBackend, "load", lambda *_, **__: None)
    load_backend(config, lambda _: None)
    assert checked == settings()


def test_launches_are_timed_and_products_checked() -> None:
    findings = {finding.name: finding for finding in on_mlx.launches()}
    assert findings["round trip"].numbers["seconds"] > 0.0
    assert findings["launches"].numbers["per_second"] > 0.0
    assert findings["product = numpy's"].level == "ok"


def test_torch_on_a_cpu_beside_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from pippin.terminal.doctor import on_torch

    monkeypatch.setattr(on_torch, "find_device", lambda: torch.device("cpu"))
    for capability, level in ((None, "info"), ((9, 0), "warning")):
        monkeypatch.setattr(on_torch, "compute_capability", lambda found=capability: found)
        assert next(on_torch.device()).level == level
    findings = {finding.name: finding for finding in on_torch.launches()}
    assert findings["product = numpy's"].level == "ok"
