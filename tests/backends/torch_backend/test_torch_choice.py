"""Which backend is loaded: what `auto` means, and that neither brings the other along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from bundled import BUNDLED_PATH
from pippin.backends import selection
from pippin.build import load_backend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import LoadError
from processes import run_python

LOAD = """
import sys
from pippin.build import load_backend
from pippin.config import Config, ModelConfig
from pippin.engine import keep_torch_out
if {backend!r} == "mlx":
    keep_torch_out()
load_backend(Config(model=ModelConfig(model={path!r}, backend={backend!r})), lambda _: None)
print(*sorted(name for name in ("mlx", "mlx_lm", "torch") if sys.modules.get(name)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "loaded"), [("torch", "torch"), ("mlx", "mlx mlx_lm")])
def test_a_backend_imports_nothing_of_the_other(backend: str, loaded: str) -> None:
    said = run_python(LOAD.format(backend=backend, path=str(BUNDLED_PATH)))
    assert said.split() == loaded.split()


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, gpu: bool, torch: bool) -> None:
    driver = tmp_path / "version"
    if gpu:
        driver.touch()
    monkeypatch.setattr(selection, "DRIVER", driver)
    monkeypatch.setattr(selection, "has_torch_for_cuda", lambda: torch)
    monkeypatch.setattr("sys.platform", "linux")


@pytest.mark.parametrize(
    ("gpu", "torch", "chosen"),
    [(True, True, "torch"), (True, False, "mlx"), (False, True, "mlx")],
)
def test_auto_is_torch_where_it_can_use_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, torch: bool, chosen: str
) -> None:
    pretend(monkeypatch, tmp_path, gpu=gpu, torch=torch)
    assert selection.choose_backend(BUNDLED_PATH) == chosen


def test_auto_is_mlx_for_what_torch_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, gpu=True, torch=True)
    for config in ('{"model_type": "gemma3_text"}', "[]", "not json"):
        (tmp_path / "config.json").write_text(config)
        assert selection.choose_backend(tmp_path) == "mlx"
    quantized = json.loads((BUNDLED_PATH / "config.json").read_text()) | {"quantization": {}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert selection.choose_backend(tmp_path) == "mlx"


def test_whether_torch_was_built_for_cuda_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    spec = selection.importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda _: spec)
    for line, has_cuda in (("cuda: Optional[str] = None", False), ("cuda = '13.0'", True)):
        (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
        assert selection.has_torch_for_cuda() is has_cuda
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda _: None)
    assert not selection.has_torch_for_cuda()


def test_options_of_mlx_are_refused() -> None:
    model = ModelConfig(model=str(BUNDLED_PATH), backend="torch")
    for engine in (EngineConfig(wired=True), EngineConfig(buffer_limit=5)):
        with pytest.raises(LoadError, match="options of mlx"):
            load_backend(Config(model=model, engine=engine), lambda _: None)
