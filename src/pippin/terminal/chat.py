"""`pippin chat` and `pippin run`: a conversation in the terminal.

With a model both find a server of it, or start one: a process in a session of its own, so that
Ctrl-C at the terminal stops a reply, not the server. It ends with this command.

Lines from a terminal are edited with history; piped lines are answered one by one. Ctrl-C stops a
reply and keeps its text; /reset starts a new conversation; /exit or end of file ends the command.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console

from pippin.config import ModelConfig
from pippin.errors import ConfigError, LoadError, PippinError
from pippin.startup.checkpoint import checkpoint_names, find_checkpoint
from pippin.startup.server_file import RunningServer, make_runtime_directory, running_servers
from pippin.terminal.server_client import ServerClient, api_key_of_environment

PROMPT = "› "
HELP = "/reset starts a new conversation, /exit ends it, Ctrl-C stops a reply"

POLL_SECONDS = 0.1
STOP_SECONDS = 30.0
SHOWN_LINES = 10  # of the log of a server that did not start

Message = dict[str, str]


Reply = Callable[[list[Message]], Iterator[str]]  # closing the iterator stops the reply


def reply_of_server(client: ServerClient, options: dict[str, Any]) -> Reply:
    model = str(client.get("/v1/models")["data"][0]["id"])
    fields = {"model": model, "stream": True, **options}
    return lambda messages: client.stream_chat({**fields, "messages": messages})


class Conversation:
    def __init__(self, reply: Reply, out: TextIO, system: str | None = None) -> None:
        self._reply = reply
        self._out = out
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self.messages = list(self._system)
                case command if command.startswith("/"):
                    self._say(f"{HELP}\n")
                case text:
                    self._turn(text)

    def _turn(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        reply = self._reply(self.messages)
        try:
            for piece in reply:
                pieces.append(piece)
                self._say(piece)
        except KeyboardInterrupt:
            self._say(" …")
        except PippinError as error:
            self._say(f"\npippin: {error.message}\n")
            self.messages.pop()
            return
        finally:
            if hasattr(reply, "close"):
                reply.close()
        self._say("\n")
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def terminal_lines() -> Iterator[str]:
    """What a person types, with line editing; an interrupted line is dropped."""
    with contextlib.suppress(ImportError):  # absent from some Python builds
        import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def run_chat(
    client: AbstractContextManager[ServerClient], *, system: str | None, options: dict[str, Any]
) -> None:
    with client as server:
        reply = reply_of_server(server, options)
        interactive = sys.stdin.isatty()
        if interactive:
            print(HELP)
        lines = terminal_lines() if interactive else iter(sys.stdin)
        Conversation(reply, sys.stdout, system).run(lines)


def run_model(
    client: AbstractContextManager[ServerClient],
    prompt: Sequence[str],
    *,
    system: str | None,
    options: dict[str, Any],
) -> None:
    asked = _asked(prompt)
    if asked is None:
        run_chat(client, system=system, options=options)
        return
    messages = [{"role": "system", "content": system}] if system else []
    with client as server:
        reply = reply_of_server(server, options)
        for text in reply([*messages, {"role": "user", "content": asked}]):
            print(text, end="", flush=True)
    print()


@contextlib.contextmanager
def client_of(
    model: ModelConfig, serve_options: Sequence[str], config_file: Path | None
) -> Iterator[ServerClient]:
    """`serve_options`: of a server that is started for it; without them any server will do."""
    with contextlib.ExitStack() as stack:
        server = None if serve_options else find_model_server(model.model)
        if server is None:
            file = [] if config_file is None else [f"--config={config_file}"]
            server = stack.enter_context(_started(model, [*serve_options, *file]))
        yield stack.enter_context(ServerClient(server.url, api_key_of_environment()))


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
