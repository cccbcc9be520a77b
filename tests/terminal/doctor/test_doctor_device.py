"""What `pippin doctor` says of a device: this one, and a Mac's, which is only described here."""

from __future__ import annotations

import os
import platform

import mlx.core as mx
import pytest

from pippin.backends.mlx import device as devices
from pippin.backends.mlx import environment
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.blas import BlasReport
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import load_backend
from pippin.terminal.doctor import Finding, machine, on_mlx, sections

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
