"""`pippin chat`: a conversation in the terminal. Knows how to talk, not who answers.

Lines from a terminal are edited with history; piped lines are answered one by one. Ctrl-C stops a
reply and keeps its text; /reset starts a new conversation; /exit or end of file ends the command.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from rich.console import Console

from pippin import LLM, SamplingParams
from pippin.config import Config
from pippin.errors import PippinError
from pippin.terminal.server_client import NoServer, ServerClient, api_key_of_environment, connect

PROMPT = "› "
HELP = "/reset starts a new conversation, /exit ends it, Ctrl-C stops a reply"

Message = dict[str, str]


class Speaker(Protocol):
    """A model that replies. Closing the iterator stops the reply."""

    def reply(self, messages: list[Message]) -> Iterator[str]: ...


class ServerSpeaker:
    """A running server's model."""

    def __init__(self, client: ServerClient, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self.model = str(client.get("/v1/models")["data"][0]["id"])

    def reply(self, messages: list[Message]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        return self._client.stream_chat(body)


class LocalSpeaker:
    """A model loaded into this process."""

    def __init__(self, llm: LLM, options: dict[str, Any]) -> None:
        self._llm = llm
        self._params = SamplingParams(**{**asdict(llm.text.defaults), **options})

    def reply(self, messages: list[Message]) -> Iterator[str]:
        return self._llm.stream_chat(messages, self._params)


class Conversation:
    def __init__(self, speaker: Speaker, out: TextIO, system: str | None = None) -> None:
        self._speaker = speaker
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
        reply = self._speaker.reply(self.messages)
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
    config: Config | None, *, url: str | None, system: str | None, options: dict[str, Any]
) -> None:
    """Chat with the model of `config`, loaded into this process; without one, with a server."""
    with contextlib.ExitStack() as stack:
        speaker: Speaker
        if config is None:
            client = stack.enter_context(_connect(url))
            speaker = ServerSpeaker(client, options)
        else:
            with Console(stderr=True).status(f"loading {config.model.model}"):
                llm = stack.enter_context(LLM(config=config))
            speaker = LocalSpeaker(llm, options)
        interactive = sys.stdin.isatty()
        if interactive:
            print(HELP)
        lines = terminal_lines() if interactive else iter(sys.stdin)
        Conversation(speaker, sys.stdout, system).run(lines)


def _connect(url: str | None) -> ServerClient:
    try:
        return connect(url, api_key_of_environment())
    except NoServer as error:
        raise NoServer(f"{error.message}; or load a model here with `pippin chat MODEL`") from error
