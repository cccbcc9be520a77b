"""Starts servers as child processes, waits until they answer, and stops them in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from pippin.bench.client import Target
from pippin.bench.report import BenchError
from pippin.bench.serve import first_model
from pippin.config import Config

START_SECONDS = 180.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_TAIL_CHARS = 2000

# mlx-lm as it comes, but with the BLAS that Pippin gives itself, so that both multiply alike.
MLX_LM_SERVER = """
import shutil
from pippin.backends.mlx.cpu.blas import load_fast_blas
load_fast_blas()
import mlx.core as mx
if shutil.which("g++") is None:  # mlx compiles with it on Linux CPUs
    mx.disable_compile()
from mlx_lm.server import main
main()
"""


@contextlib.contextmanager
def pippin_server(
    model: str, options: Sequence[str] = (), *, killed: bool = False
) -> Iterator[Target]:
    """`pippin serve MODEL OPTIONS` on a free port, and nothing out of a pippin.toml.

    With `killed`, it is given no time to end in order.
    """
    port = free_port()
    command = [sys.executable, "-m", "pippin", "serve", model, "--port", str(port)]
    command += ["--config", os.devnull, *options]
    url = f"http://127.0.0.1:{port}"
    with _child("pippin", command, url, killed=killed):
        yield Target(url, first_model(url), extra={"ignore_eos": True})


def as_options(config: Config) -> list[str]:
    """What `pippin serve` reads this config's model and engine from; the model comes first."""
    options = [config.model.model]
    for section in (config.model, config.engine):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            flag = field.name.replace("_", "-")
            if field.name == "model" or value is None:
                continue
            if isinstance(value, bool):
                options.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                options += [f"--{flag}", str(value)]
    return options


@contextlib.contextmanager
def mlx_lm_server(model_dir: Path, options: Sequence[str] = ()) -> Iterator[Target]:
    """mlx-lm's server on a free port. It has no option to ignore the end of a reply."""
    port = free_port()
    command = [sys.executable, "-c", MLX_LM_SERVER, "--model", str(model_dir)]
    command += ["--port", str(port), "--log-level", "WARNING", *options]
    url = f"http://127.0.0.1:{port}"
    with _child("mlx-lm", command, url):
        yield Target(url, "default_model")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, so that child processes are ended on this way out too."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def _child(name: str, command: Sequence[str], url: str, *, killed: bool = False) -> Iterator[None]:
    with tempfile.TemporaryFile() as log, ended_by_sigterm():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "PIPPIN_API_KEY"},  # we send none
        )
        try:
            _wait_until_healthy(name, process, url, log)
            yield
        finally:
            _end(process, killed=killed)


def _wait_until_healthy(
    name: str, process: subprocess.Popen[bytes], url: str, log: IO[bytes]
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"{name} left with status {process.returncode}:\n{_tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"{name} did not answer within {START_SECONDS:.0f} s:\n{_tail(log)}")


def _end(process: subprocess.Popen[bytes], *, killed: bool = False) -> None:
    """Ask the whole process group to leave, then make it."""
    ways = [(signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)]
    for number, patience in ways[1:] if killed else ways:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-LOG_TAIL_CHARS:].strip()


FLOATS = ("F16", "BF16", "F32")
SPECIAL_NAMES = (
    *(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
    "additional_special_tokens",
    "extra_special_tokens",
)
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def write_endless_copy(source: Path, target: Path, *, float32: bool) -> None:
    """A checkpoint that never ends a reply by itself; without `float32` the weights are linked to.

    mlx-lm's server has no option to ignore the end of a reply. In the copy what would have been the
    end is a token like any other, so it is given text: a token without text comes as no event, and
    would look like a pause of two steps. mlx-lm computes in the type that it finds on disk, and on
    CPUs float32 is much the fastest.
    """
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, target / path.name)
    for path in source.glob("*.safetensors"):
        if float32:
            _copy_as_float32(path, target / path.name)
        else:
            (target / path.name).symlink_to(path.resolve())
    for name in ("config.json", "generation_config.json"):
        _edit(target / name, _drop_ends)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _edit(target / name, _show_every_token)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data_offsets} of the tensors of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _copy_as_float32(source: Path, target: Path) -> None:
    import mlx.core as mx

    for name, entry in read_header(source).items():
        if entry["dtype"] not in FLOATS:
            raise BenchError(f"{source.name}: {name} is {entry['dtype']}, no float16, 32 or bf16")
    weights, metadata = mx.load(str(source), return_metadata=True)  # mlx-lm reads the format there
    assert isinstance(weights, dict)
    assert isinstance(metadata, dict)
    cast = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(target), cast, metadata)


def _edit(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
        edit(config)
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _drop_ends(config: dict[str, Any]) -> None:
    for section in (config, config.get("text_config", {})):
        section.pop("eos_token_id", None)


def _show_every_token(config: dict[str, Any]) -> None:
    """Name no token as special, and mark none."""
    for name in SPECIAL_NAMES:
        config.pop(name, None)
    decoder: dict[str, dict[str, Any]] = config.get("added_tokens_decoder", {})
    for token in (*config.get("added_tokens", []), *decoder.values()):
        token["special"] = False


ON_CPU = {
    "mlx": "from pippin.backends.mlx.device import on_cpu; print(on_cpu())",
    "torch": (
        "import torch; print(not (torch.cuda.is_available() or torch.backends.mps.is_available()))"
    ),
}


def computes_on_cpu(library: str) -> bool:
    """Whether mlx or torch does: asked in a process of its own, since this one imports neither."""
    answer = subprocess.check_output([sys.executable, "-c", ON_CPU[library]], text=True)
    return answer.split()[-1] == "True"
