"""`pippin run`: a chat with a model, on a server that serves it. Starts one if none does.

The server is a process of its own, in a session of its own: Ctrl-C at the terminal stops a reply,
not the server. It ends with this command.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from pippin.config import ModelConfig
from pippin.errors import ConfigError, LoadError
from pippin.startup.checkpoint import checkpoint_names, find_checkpoint
from pippin.startup.server_file import RunningServer, make_runtime_directory, running_servers
from pippin.terminal.chat import HELP, Conversation, ServerSpeaker, terminal_lines
from pippin.terminal.server_client import ServerClient, api_key_of_environment

POLL_SECONDS = 0.1
STOP_SECONDS = 30.0
SHOWN_LINES = 10  # of the log of a server that did not start


def run_model(
    model: ModelConfig,
    prompt: Sequence[str],
    *,
    serve_options: Sequence[str],
    config_file: Path | None,
    system: str | None,
    options: dict[str, Any],
) -> None:
    """`serve_options`: of a server that is started for it; without them any server will do."""
    asked = _asked(prompt)
    with contextlib.ExitStack() as stack:
        server = None if serve_options else find_model_server(model.model)
        if server is None:
            file = [] if config_file is None else [f"--config={config_file}"]
            server = stack.enter_context(_started(model, [*serve_options, *file]))
        key = api_key_of_environment()
        speaker = ServerSpeaker(stack.enter_context(ServerClient(server.url, key)), options)
        if asked is None:
            print(HELP)
            Conversation(speaker, sys.stdout, system).run(terminal_lines())
            return
        messages = [{"role": "system", "content": system}] if system else []
        for text in speaker.reply([*messages, {"role": "user", "content": asked}]):
            print(text, end="", flush=True)
        print()


def find_model_server(name: str) -> RunningServer | None:
    """A server of this user that serves a model, by any of the names that it is served under."""
    path = Path(name).expanduser()
    for server in running_servers():
        for checkpoint in map(Path, server.checkpoints[:1]):  # of the model that it replies with
            same = path.is_dir() and path.resolve() == checkpoint.resolve()
            if same or name in (server.model, *checkpoint_names(checkpoint)):
                return server
    return None


def _asked(prompt: Sequence[str]) -> str | None:
    """What was piped, then what is on the command line; None: a person types."""
    parts = [" ".join(prompt)]
    if not sys.stdin.isatty():
        parts.insert(0, sys.stdin.read())
    text = "\n\n".join(filter(None, map(str.strip, parts)))
    if not text and not sys.stdin.isatty():
        raise ConfigError("prompt is empty: write it after the model, or pipe it into this command")
    return text or None


@contextlib.contextmanager
def _started(model: ModelConfig, options: Sequence[str]) -> Iterator[RunningServer]:
    find_checkpoint(model)  # downloads it here, where a person sees the progress
    try:
        make_runtime_directory()
    except OSError as error:
        raise LoadError(f"a server that is started here could not be found: {error}") from error
    command = [sys.executable, "-m", "pippin", "serve", f"--model={model.model}", "--port=0"]
    with tempfile.TemporaryFile() as log, _exiting_at_signals():
        process = subprocess.Popen(
            [*command, "--no-page", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            with Console(stderr=True).status(f"starting a server for {model.model}"):
                server = _wait_until_ready(process, log)
            yield server
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: IO[bytes]) -> RunningServer:
    """Its file appears when its model is loaded."""
    while process.poll() is None:
        server = next((s for s in running_servers() if s.pid == process.pid), None)
        if server is not None:
            return server
        time.sleep(POLL_SECONDS)
    log.seek(0)
    last = log.read().decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
    raise LoadError("the server exited before its model was loaded:\n" + "\n".join(last))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _exiting_at_signals() -> Iterator[None]:
    """A closed terminal, or `kill`, must not leave the server behind."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
