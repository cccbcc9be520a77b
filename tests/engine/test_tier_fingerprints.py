"""What was computed otherwise has another fingerprint, and is never read from disk."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from pippin.backends import fake as fake_backend
from pippin.backends.fake import FakeBackend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import fingerprint

FAKE = Config(model=ModelConfig(backend="fake"))
DETERMINISTIC = Config(model=FAKE.model, engine=EngineConfig(deterministic=True))


@pytest.mark.parametrize("config", [FAKE, DETERMINISTIC], ids=["plain", "deterministic"])
def test_the_number_of_a_backends_arithmetic_counts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint(config, FakeBackend())
    assert fingerprint(config, FakeBackend()) == first
    monkeypatch.setattr(fake_backend, "ARITHMETIC_VERSION", fake_backend.ARITHMETIC_VERSION + 1)
    assert fingerprint(config, FakeBackend()) != first


def test_with_safe_nothing_is_read_that_our_operations_wrote() -> None:
    safe = Config(model=FAKE.model, engine=EngineConfig(safe=True))
    assert fingerprint(safe, FakeBackend()) != fingerprint(FAKE, FakeBackend())


def test_backends_name_their_number_and_their_libraries() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("mlx.core")
    from pippin.backends.mlx import backend as mlx_backend
    from pippin.backends.torch import backend as torch_backend

    of_mlx = mlx_backend.MLXBackend.arithmetic.fget(None)  # type: ignore[attr-defined]
    of_torch = torch_backend.TorchBackend.arithmetic.fget(None)  # type: ignore[attr-defined]
    assert of_torch == f"torch {torch_backend.ARITHMETIC_VERSION}, torch {torch.__version__}"
    mlx_version = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert of_mlx == f"mlx {mlx_backend.ARITHMETIC_VERSION}, {mlx_version}"
