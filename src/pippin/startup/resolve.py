"""Resolves every "auto" of a config, once, at start-up. Reads no weights."""

from __future__ import annotations

import dataclasses
import logging
import re
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_state_path

from pippin.api.http.keys import read_key_file
from pippin.backends.nvidia import compute_capability
from pippin.backends.torch.config import read_config, read_shape, suit_kernels
from pippin.config import BackendName, Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError, LoadError
from pippin.startup.describe_checkpoint import most_context
from pippin.startup.drafts.by_default import resolve_speculate
from pippin.startup.drafts.draft_model import resolve_draft_model
from pippin.startup.find_checkpoint import find_checkpoint, model_name

LEAST_CAPABILITY = (8, 0)
NO_OPTIONS = EngineConfig()

logger = logging.getLogger(__name__)


def resolve(config: Config) -> Config:
    """Every "auto" that can be decided without the device; the model as a directory."""
    model, server = config.model, with_keys(config.server)
    path = find_checkpoint(model)
    check_max_len(model, path)
    served_name = server.served_name or model_name(model)
    model = dataclasses.replace(
        model, model=str(path), backend=choose_backend(model.backend, path, config.engine)
    )
    return dataclasses.replace(
        config,
        engine=resolve_speculate(resolve_draft_model(config.engine, path), model),
        model=model,
        server=dataclasses.replace(
            server,
            served_name=served_name,
            batch_dir=server.batch_dir or str(_batch_dir(served_name)),
        ),
    )


def check_max_len(model: ModelConfig, path: Path) -> None:
    """Raises ConfigError where positions would be beyond what the checkpoint is for."""
    if model.max_len is None or model.backend == "fake":
        return
    most = most_context(path)
    if most is not None and model.max_len > most:
        raise ConfigError(
            f"--max-len is {model.max_len:,} tokens, and {path.name} holds {most:,} by its "
            f"config.json: use --max-len {most} or less, or another model"
        )


def with_keys(server: ServerConfig) -> ServerConfig:
    """Also those in files."""
    return dataclasses.replace(
        server,
        api_key=(*server.api_key, *_keys_in(server.api_key_file)),
        admin_key=(*server.admin_key, *_keys_in(server.admin_key_file)),
    )


def _batch_dir(served_name: str) -> Path:
    """Requests name their model: what they were sent for is served there again."""
    return user_state_path("pippin") / "batches" / re.sub(r"[^\w.-]|^\.+", "_", served_name)


def _keys_in(path: str | None) -> tuple[str, ...]:
    return () if path is None else read_key_file(path)


def choose_backend(name: str, checkpoint: Path, engine: EngineConfig = NO_OPTIONS) -> BackendName:
    """`auto`: torch on an NVIDIA GPU, for a checkpoint that its kernels take; else mlx where it
    can run; else torch. Imports neither of them."""
    match name:
        case "mlx" | "torch" | "fake":
            return name
    asks_for_mlx = engine.wired or engine.buffer_limit is not None
    if not asks_for_mlx and has_torch_for_cuda() and torch_kernels_take(checkpoint):
        return "torch"
    if has_mlx():
        return "mlx"
    if find_spec("torch") is not None:
        return "torch"
    raise LoadError(
        "neither mlx nor torch is installed: run pip install 'pippin[cpu]' or 'pippin[torch]'"
    )


def has_mlx() -> bool:
    """Whether its library is installed: on Linux the wheel `mlx` does not contain it."""
    return _has_library("mlx", "libmlx.*")


def has_torch_for_cuda() -> bool:
    """Whether torch is installed for CUDA, with a GPU that supports Triton and bfloat16."""
    if not _has_library("torch", "libtorch_cuda.*"):
        return False
    capability = compute_capability()
    return capability is not None and capability >= LEAST_CAPABILITY


def torch_kernels_take(checkpoint: Path) -> bool:
    """Not only whether torch serves it: plain operations are slower than mlx is."""
    try:
        return suit_kernels(read_shape(read_config(checkpoint)).keeping_all())
    except LoadError as error:  # an architecture that torch lacks, or an unknown one
        logger.info("auto does not choose torch: %s", error.message)
        return False


def _has_library(package: str, pattern: str) -> bool:
    found = find_spec(package)
    folders = found.submodule_search_locations if found is not None else None
    return any(any(Path(folder, "lib").glob(pattern)) for folder in folders or ())
