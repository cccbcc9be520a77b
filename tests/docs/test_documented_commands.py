"""Every command in the documents is run, or parsed where running takes a GPU, a network or long."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pippin import __version__, cli
from processes import environment, environment_without_compiler, serve

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS += sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = "pippin python python3 make pip curl hf apt docker journalctl loginctl claude codex"
PROGRAM = re.compile(rf"({'|'.join(PROGRAMS.split())}|source|kill|tail|head|\.venv/bin/\w+) ")
SHELL = ("", "bash", "sh")

NOT_RUN = {
    "apt install": "changes the machine",
    "claude -p": "another program",
    "codex exec": "another program",
    "curl -X POST http://127.0.0.1:8000/restart_replicas": "needs replicas",
    "docker build": "needs a Docker daemon",
    "docker compose": "needs a Docker daemon",
    "docker run": "needs a Docker daemon",
    "docker stop": "another program",
    "head -1": "any file will do",
    "hf ": "needs a network",
    "journalctl ": "needs an installed service",
    "kill -9": "a signal, not a command line",
    "loginctl ": "needs root",
    "python3 -m venv": "makes an environment",
    "source <(": "needs a shell; `pippin completion bash` is run",
    "tail -F": "needs a Mac",
    "pip uninstall": "changes the environment",
    ".venv/bin/python -m pytest": "a worked example, or one of our own tests",
    ".venv/bin/python -m mypy": "a part of make test",
    ".venv/bin/python -m ruff": "a part of make test",
}
# Run against a server of the bundled model, in this order; the last ones when it has stopped.
ON_A_SERVER = ("pippin status", "pippin cache flush")
ON_A_DIRECTORY = tuple(
    f"pippin cache {verb} --cache-dir DIR" for verb in ("show", "verify", "empty")
)
ALONE = ("pippin config", "pippin serve --help", "pippin serve --help-all")


def commands_of(text: str) -> Iterator[str]:
    """Of shell blocks, lines that quotes hold together as one; and inline code."""
    text = text.replace("\\\n", " ")
    for language, block in FENCE.findall(text):
        line = ""
        for part in block.splitlines() if language in SHELL else ():
            line += part.strip()
            if line.count("'") % 2 == 0:
                yield line.partition(" # ")[0].strip()
                line = ""
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(code.split())


COMMANDS = sorted(
    {
        command
        for document in DOCUMENTS
        for command in commands_of(document.read_text(encoding="utf-8"))
        if PROGRAM.match(command)
    }
)
TESTED = [command for command in COMMANDS if not command.startswith(tuple(NOT_RUN))]


def test_every_command_is_tested_or_there_is_a_reason() -> None:
    known = ("pippin ", "make ", "pip install ", "pip download ", "curl ", "python tools/")
    assert [command for command in TESTED if not command.startswith(known)] == []
    unused = [start for start in NOT_RUN if not any(c.startswith(start) for c in COMMANDS)]
    assert unused == []
    assert {*ON_A_SERVER, *ON_A_DIRECTORY, *ALONE} <= set(COMMANDS)


def test_commands_of_pippin_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their values, not only the names of their options."""
    monkeypatch.chdir(tmp_path)
    for command in TESTED:
        words = shlex.split(command)
        options = [word for word in words if word.startswith("-")]
        if words[0] == "pippin" and options and not options[-1].startswith(("--help", "--install")):
            words = [str(tmp_path) if word == "DIR" else word for word in words[1:]]
            parsed, _, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
            assert callable(parsed), command


@pytest.mark.parametrize("command", ALONE)
def test_commands_that_need_no_server_run(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        cli.main(shlex.split(command)[1:])
    assert exited.value.code == 0
    assert capsys.readouterr().out


def test_make_commands_run_dry() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for command in (c for c in TESTED if c.startswith("make ")):
        program, *words = shlex.split(command)
        done = subprocess.run(
            [program, "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_what_pip_installs_exists() -> None:
    ours, demo = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        for path in (".", "demo")
    )
    versions = {"pippin": __version__, "pippin_demo": demo["version"]}
    wheels = {f"{name}-{version}-py3-none-any.whl" for name, version in versions.items()}
    for command in (c for c in TESTED if c.startswith("pip ")):
        extras = re.findall(r"\[([\w,]+)\]", command)
        named = {extra for group in extras for extra in group.split(",")}
        assert named <= set(ours["optional-dependencies"]), command
        assert set(re.findall(r"dist/(\S+?\.whl)", command)) <= wheels


PARSE_TOOLS = """
import argparse, cyclopts, json, runpy, sys
parse = argparse.ArgumentParser.parse_args
class Parsed(Exception): pass
def parse_and_stop(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_and_stop
def parse_words_and_stop(self, words):
    self.parse_args(words, print_error=True)
    raise Parsed
cyclopts.App.__call__ = parse_words_and_stop
for words in json.loads(sys.argv[1]):
    sys.argv = words
    sys.path[0] = words[0].rpartition("/")[0]
    try:
        runpy.run_path(words[0], run_name="__main__")
        sys.exit(f"{words}: parses no options")
    except Parsed:
        print(*words)
"""


@pytest.mark.slow
def test_options_of_tools_parse() -> None:
    commands = [shlex.split(c)[1:] for c in TESTED if c.startswith("python tools/")]
    done = subprocess.run(
        [sys.executable, "-c", PARSE_TOOLS, json.dumps(commands)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == len(commands)


def run_pippin(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main([word.replace("DIR", "cache") for word in shlex.split(command)[1:]])
    assert exited.value.code == 0
    assert capsys.readouterr().out


def request(command: str, url: str) -> httpx.Response:
    """What curl would send; of a stream that never ends the first part."""
    words = iter(shlex.split(command.replace("http://127.0.0.1:8000", url))[1:])
    target, headers, body = "", {}, None
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        elif word != "-N":
            target = word
    method = "GET" if body is None else "POST"
    with httpx.stream(method, target, headers=headers, content=body, timeout=60) as reply:
        assert next(reply.iter_text())
        return reply


def python_blocks(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [block for language, block in FENCE.findall(text) if language == "python"]


@pytest.mark.slow
def test_commands_and_clients_work_on_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a free port and with a cache on disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where the server is found
    options = ("--cache-dir", "cache", "--disk", "32MB", "--memory", "300MB")
    with serve(*options, env=environment_without_compiler()) as server:
        for command in (c for c in TESTED if c.startswith("curl ")):
            assert request(command, server.url).status_code == 200, command
        for package in ("openai", "anthropic"):
            blocks = python_blocks("clients.md")
            code = next(block for block in blocks if block.startswith(f"from {package} import"))
            code = code.replace("http://127.0.0.1:8000", server.url)
            names: dict[str, Any] = {}
            exec(code.replace("MODEL", "stories-hybrid-20m"), names)
            names[
                "client"
            ].close()  # its connections, which would be closed whenever it is collected
        capsys.readouterr()
        for command in ON_A_SERVER:
            run_pippin(command, capsys)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait()
    for command in ON_A_DIRECTORY:
        run_pippin(command, capsys)


@pytest.mark.slow
def test_programs_that_load_a_model_run(tmp_path: Path) -> None:
    blocks = python_blocks("python.md")
    assert len(blocks) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=environment_without_compiler(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_all_programs_in_the_documents_compile() -> None:
    for document in DOCUMENTS:
        for language, block in FENCE.findall(document.read_text(encoding="utf-8")):
            if language == "python":
                compile(block, document.name, "exec")
