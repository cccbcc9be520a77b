"""Which backend is loaded, that neither brings the other along, and what a CPU computes with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from bundled import BUNDLED_PATH
from pippin.backends.torch import streams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import load_backend
from pippin.errors import LoadError
from processes import run_python

LOAD = """
import sys
from pippin.engine.build_loop import load_backend
from pippin.config import Config, ModelConfig
from pippin.engine.run import keep_torch_out
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


def test_options_of_mlx_are_refused() -> None:
    model = ModelConfig(model=str(BUNDLED_PATH), backend="torch")
    for engine in (EngineConfig(wired=True), EngineConfig(buffer_limit=5)):
        with pytest.raises(LoadError, match="options of mlx"):
            load_backend(Config(model=model, engine=engine), lambda _: None)


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_is_left_out_where_it_does_not_multiply_the_models_type(
    supported: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch warns of it in the middle of a step; what the process had set is restored."""
    monkeypatch.setattr(streams, "has_bfloat16_products", lambda: supported)
    before = torch._C._get_mkldnn_enabled()
    with streams.make_streams(torch.device("cpu"), dtype).forward():
        is_on = torch._C._get_mkldnn_enabled()
    assert is_on == (before and (supported or dtype != torch.bfloat16))
    assert torch._C._get_mkldnn_enabled() == before
