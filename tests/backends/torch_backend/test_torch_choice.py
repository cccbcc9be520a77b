"""Which backend is loaded: what `auto` means, and that neither brings the other along."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from bundled import BUNDLED_PATH
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
