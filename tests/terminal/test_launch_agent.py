"""`pippin launch`: an agent gets the address, the model and the key, and its settings are kept."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from api.scripted_engine import ScriptedEngine, answer_anything, serving
from cli.commands import error_of
from pippin import cli
from pippin.cli.coding_agents import CODING_AGENTS, AgentName
from pippin.config import ServerConfig
from pippin.startup.server_file import announced
from processes import environment

# A path with a space cannot stand behind #!
PROGRAM = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -c '
import json, sys
with open("seen.json", "w") as file:
    json.dump({{"arguments": sys.argv[1:]}}, file)
sys.exit(3)
' "$@"
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Agents that write down how they were started; nothing else is on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in CODING_AGENTS:
        (folder / command).write_text(PROGRAM)
        (folder / command).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("pippin.terminal.server_client.DEFAULT_URL", "http://127.0.0.1:9")
    for name in ("PIPPIN_API_KEY", "PIPPIN_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ScriptedEngine(answer_anything)) as url:
        yield url


def launched(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the variables that the command would become the agent with."""
    seen: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execve", lambda *given: seen.append(given))
    with pytest.raises(SystemExit):
        cli.main(["launch", *argv])
    ((program, words, variables),) = seen
    assert Path(program).name == words[0]
    return words[1:], variables


@pytest.mark.slow
def test_the_command_becomes_the_agent(url: str) -> None:
    command = [sys.executable, "-m", "pippin", "launch", "codex", "--url", url, "--", "exec", "-x"]
    done = subprocess.run(command, env=environment(), check=False)
    assert done.returncode == 3  # the agent's own
    seen = json.loads(Path("seen.json").read_text())
    assert seen["arguments"][-2:] == ["exec", "-x"]


def test_every_agent_of_the_table_is_a_choice_of_the_command() -> None:
    assert list(CODING_AGENTS) == list(get_args(AgentName))


def test_claude_gets_variables_and_no_key_of_the_vendor(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-the-user")
    monkeypatch.setenv("KEPT", "1")
    arguments, variables = launched(
        monkeypatch, "claude", "--url", url, "--", "--continue", "-p", "hi there"
    )
    assert arguments == ["--continue", "-p", "hi there"]
    assert variables["ANTHROPIC_BASE_URL"] == url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "stories"
    assert variables["KEPT"] == "1"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert "ANTHROPIC_API_KEY" not in variables


def test_codex_gets_overrides_of_its_settings(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = launched(monkeypatch, "codex", "--url", url, "--", "exec", "hi")
    assert arguments[-2:] == ["exec", "hi"]
    assert arguments[:-2:2] == ["-c"] * 6
    assert arguments[1:-2:2] == [
        'model="stories"',
        'model_provider="pippin"',
        "model_context_window=8192",
        'model_providers.pippin.name="Pippin"',
        f'model_providers.pippin.base_url="{url}/v1"',
        'model_providers.pippin.wire_api="responses"',
    ]


def test_other_agents_get_openais_variables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, variables = launched(monkeypatch, "qwen", "--url", url)
    assert arguments == ["--auth-type", "openai"]
    assert (variables["OPENAI_BASE_URL"], variables["OPENAI_MODEL"]) == (f"{url}/v1", "stories")
    assert variables["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    arguments, variables = launched(monkeypatch, "aider", "--url", url)
    assert arguments == ["--model", "openai/stories"]
    assert variables["OPENAI_API_BASE"] == f"{url}/v1"
    _, variables = launched(monkeypatch, "opencode", "--url", url)
    settings = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "pippin/stories"
    provider = settings["provider"]["pippin"]
    assert provider["options"]["baseURL"] == f"{url}/v1"
    assert provider["models"] == {"stories": {"limit": {"context": 8192, "output": 2048}}}


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("claude", "ANTHROPIC_AUTH_TOKEN"),
        ("codex", "PIPPIN_API_KEY"),
        ("qwen", "OPENAI_API_KEY"),
        ("aider", "OPENAI_API_KEY"),
    ],
)
def test_a_key_is_passed_on_by_a_variable_and_never_by_an_argument(
    monkeypatch: pytest.MonkeyPatch, command: str, variable: str
) -> None:
    monkeypatch.setenv("PIPPIN_API_KEY", "secret")
    config = ServerConfig(api_key=("secret",))
    with serving(ScriptedEngine(answer_anything), config) as url, announced(url, "stories"):
        arguments, variables = launched(monkeypatch, command)
    assert variables[variable] == "secret"
    assert "secret" not in " ".join(arguments)
    assert (command != "codex") or 'env_key="PIPPIN_API_KEY"' in " ".join(arguments)


def test_a_context_that_is_too_short_for_the_agents_own_prompt_is_noted(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, "claude", "--url", url)
    said = capsys.readouterr().err
    assert "stories has a context of 8,192 tokens, and the prompts of Claude Code start" in said
    launched(monkeypatch, "aider", "--url", url)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", CODING_AGENTS)
def test_an_agent_that_is_not_installed_is_named_with_how_to_install_it(
    programs: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (programs / command).unlink()
    status, text = error_of(capsys, "launch", command)
    assert status == 1
    assert f"there is no {command} on the PATH. Install it with `" in text
