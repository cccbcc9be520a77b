"""Resolves every "auto" of a config, once, at start-up. Reads no weights."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
from platformdirs import user_cache_path, user_state_path

from pippin.api.http.access_control import read_key_file
from pippin.backends.host import cpu_name, num_threads
from pippin.backends.nvidia import compute_capability, gpu_name
from pippin.backends.torch.config import FAMILIES, read_config, read_shape, suit_kernels
from pippin.config import BackendName, Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import ConfigError, LoadError, UnsupportedLayout
from pippin.startup.checkpoint import (
    check_checkpoint,
    find_checkpoint,
    model_name,
    most_context,
)
from pippin.text.tokenizer import Tokenizer, read_json
from pippin.version import __version__, installed_versions

LEAST_GAIN = 1.05  # times as fast: less may be chance
MOST_KEPT = 64  # gains in the file; the oldest are dropped
LIBRARIES = {"mlx": ("mlx", "mlx-lm"), "torch": ("torch", "triton")}

logger = logging.getLogger(__name__)


class Gain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    served: dict[str, str]
    ratio: float  # of one greedy reply: how many times as fast
    same_reply: bool  # where rounding leaves no choice
    day: str

    @property
    def pays(self) -> bool:
        return self.same_reply and self.ratio >= LEAST_GAIN


def gains_path() -> Path:
    return user_cache_path("pippin") / "draft_gains.json"


def served_by(model: ModelConfig) -> dict[str, str]:
    """What a gain is of: a resolved model, on this machine."""
    folder = Path(model.model).resolve()
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    # Weights that were replaced in place have other times.
    states = [(path.name, (facts := path.stat()).st_size, facts.st_mtime_ns) for path in paths]
    # A GPU's speed counts, and so does the host's, which launches.
    chosen = os.environ.get("MLX_DEFAULT_DEVICE")
    device = [gpu_name(), cpu_name(), f"{num_threads()} threads", chosen]
    libraries = installed_versions(LIBRARIES.get(model.backend, ()))
    versions = {"pippin": __version__, "Python": platform.python_version(), **libraries}
    return {
        "model": str(folder),
        "files": hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest(),
        "backend": model.backend,
        "dtype": model.dtype,
        "device": ", ".join(part for part in device if part),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def keep_gain(gain: Gain) -> None:
    """In place of an earlier one of the same. Raises OSError if the file cannot be written."""
    others = [each for each in _read() if each.served != gain.served]
    found = [*others[-MOST_KEPT + 1 :], gain]
    path = gains_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    new.replace(path)


def _read() -> tuple[Gain, ...]:
    path = gains_path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Gain, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s is not read, and says nothing of drafts: %s", path, error)
        return ()


def resolve_draft_model(engine: EngineConfig, model: Path) -> EngineConfig:
    """With the draft model as a directory, and drafts on unless they were turned off."""
    if (name := engine.draft_model) is None:
        if engine.speculate == "draft":
            raise LoadError("speculate is draft, and no draft model is given: add --draft-model")
        return engine
    if engine.speculate == "off":
        return replace(engine, draft_model=None)
    if engine.speculate in ("suffix", "mtp"):
        raise LoadError(
            f"draft_model is {name}, and speculate is {engine.speculate}, which does not use it: "
            "use --speculate draft or auto, or remove --draft-model"
        )
    path = find_checkpoint(ModelConfig(model=name))
    _check_tokens(Tokenizer.load(path).vocabulary, Tokenizer.load(model).vocabulary, name)
    return replace(engine, draft_model=str(path), speculate=engine.speculate or "draft")


def _check_tokens(draft: dict[int, str], own: dict[int, str], name: str) -> None:
    def shown(token: str | None) -> str:
        return "missing" if token is None else repr(token[:40])

    differing = [id for id in draft.keys() | own.keys() if draft.get(id) != own.get(id)]
    if differing:
        first = min(differing)
        raise LoadError(
            f"draft_model: {name} has another tokenizer than the model: token {first:,} is "
            f"{shown(draft.get(first))} there and {shown(own.get(first))} in the model, and "
            f"{len(differing):,} tokens differ in all; use a draft model of the same family"
        )


def resolve_speculate(engine: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`model` is resolved. What was given stays."""
    if engine.speculate is not None:
        return engine
    gains = () if engine.deterministic or engine.safe else _read()  # neither has drafts
    served = served_by(model) if gains else {}
    gain = next((gain for gain in gains if gain.served == served), None)
    if gain is None or not gain.pays:
        return replace(engine, speculate="off")
    logger.info(
        "speculate: auto: pippin doctor measured %.2f times as fast here on %s, for %s",
        gain.ratio,
        gain.day,
        gain.served["model"],
    )
    return replace(engine, speculate="auto")


LEAST_CAPABILITY = (8, 0)
NO_OPTIONS = EngineConfig()


def resolve(config: Config) -> Config:
    """Every "auto" that can be decided without the device; the model as a directory."""
    model, server = config.model, with_keys(config.server)
    path = find_checkpoint(model)
    _check_max_len(model, path)
    name = server.served_name or model_name(model)
    # Requests name their model: what they were sent for is served there again.
    batches = user_state_path("pippin") / "batches" / re.sub(r"[^\w.-]|^\.+", "_", name)
    backend = choose_backend(model.backend, path, config.engine)
    model = replace(model, model=str(path), backend=backend)
    return replace(
        config,
        engine=resolve_speculate(resolve_draft_model(config.engine, path), model),
        model=model,
        server=replace(server, served_name=name, batch_dir=server.batch_dir or str(batches)),
    )


def _check_max_len(model: ModelConfig, path: Path) -> None:
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
    api, admin = (
        () if path is None else read_key_file(path)
        for path in (server.api_key_file, server.admin_key_file)
    )
    return replace(server, api_key=(*server.api_key, *api), admin_key=(*server.admin_key, *admin))


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
    return _has_file("mlx", "lib", "libmlx.*")


def has_torch_for_cuda() -> bool:
    """Whether torch is installed for CUDA, with a GPU that supports Triton and bfloat16."""
    if not _has_file("torch", "lib", "libtorch_cuda.*"):
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


def _has_file(package: str, folder: str, pattern: str) -> bool:
    """Whether an installed package has it, which is not imported."""
    found = find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return any(any(Path(place, folder).glob(pattern)) for place in places or ())


Servable = Literal["yes", "no", "unknown"]


def is_servable(path: Path) -> tuple[Servable, str]:
    """With the reason, where it is not. `unknown`: only loading it shows whether it is."""
    try:
        check_checkpoint(path)
        config = read_json(path / "config.json")
        family = str(config.get("model_type"))
        if has_mlx():
            _check_family(family)
            if _has_file_in_mlx_lm(family):
                return "yes", ""
        if family in FAMILIES and find_spec("torch") is not None:
            read_shape(config)  # it refuses what torch lacks of a family
            return "yes", ""
    except LoadError as error:
        return "no", error.message
    return "unknown", ""


def _check_family(family: str) -> None:
    from pippin.backends.mlx.refusals import check  # prepares mlx's import

    try:
        check(family)
    except UnsupportedLayout:
        if family not in FAMILIES:
            raise


def _has_file_in_mlx_lm(family: str) -> bool:
    return family.isidentifier() and _has_file("mlx_lm", "models", f"{family}.py")
