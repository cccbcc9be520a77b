"""Which model is served, and with what. Knows no request."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from pippin.config.checks import check_at_least
from pippin.errors import ConfigError

MAX_FAKE_STEP = 60.0
BackendName = Literal["mlx", "torch", "fake"]


@dataclass(frozen=True)
class ModelConfig:
    model: str = "stories-hybrid-20m"
    """Model: a local directory, a Hugging Face id such as Qwen/Qwen3.5-0.8B, or the name of the
    demo model that pippin[demo] installs."""

    _: KW_ONLY

    backend: Literal["auto", "mlx", "torch", "fake"] = "auto"
    """Library that runs the model. `auto`: torch on an NVIDIA GPU if its kernels support the model;
    otherwise mlx if it is installed; otherwise torch. `fake` needs no model and returns meaningless
    text quickly, to test clients."""

    fake_step: float = 0.0
    """Seconds that each step of `--backend fake` takes at least, to stream at the pace of a real
    model: 0.02 for 50 tokens per second and stream."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of weights and activations. `auto`: float32 on CPUs, otherwise the data type of the
    checkpoint."""

    revision: str | None = None
    """Branch, tag or commit to download of a Hugging Face id. Default: the main branch."""

    max_len: int | None = None
    """Maximum length of a prompt and its reply together, in tokens. Default: the context length in
    the checkpoint; more only as far as its config.json scales positions."""

    def __post_init__(self) -> None:
        check_at_least(self, max_len=1)
        if not 0.0 <= self.fake_step <= MAX_FAKE_STEP:
            raise ConfigError(
                f"fake_step must be from 0 to {MAX_FAKE_STEP:g} seconds, got {self.fake_step}"
            )
        if self.fake_step and self.backend != "fake":
            raise ConfigError(
                f"fake_step requires the fake backend, and backend is {self.backend}: remove "
                "--fake-step or add --backend fake"
            )
