"""`pippin launch`: becomes a coding agent that uses a running server. Knows no agent by name."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from pippin.errors import LoadError
from pippin.terminal.coding_agents import CODING_AGENTS, Target
from pippin.terminal.find_server import connect
from pippin.terminal.server_client import api_key_of_environment


def launch_agent(command: str, arguments: Sequence[str], url: str | None) -> NoReturn:
    """This process is the agent from here on, in this terminal and with its exit status."""
    agent = CODING_AGENTS[command]
    program = shutil.which(agent.command)
    if program is None:
        raise LoadError(
            f"{agent.name} is not installed: there is no {agent.command} on the PATH. Install it "
            f"with `{agent.install}`"
        )
    with connect(url, api_key_of_environment()) as client:
        served = client.get("/v1/models")["data"][0]
        target = Target(client.url, served["id"], served["max_model_len"], client.api_key)
    if 2 * target.context < 3 * agent.prompt_tokens:
        print(
            f"pippin: {target.model} has a context of {target.context:,} tokens, and the "
            f"prompts of {agent.name} start with about {agent.prompt_tokens:,}: serve a model with "
            "a longer one, and without a --max-len that cuts it",
            file=sys.stderr,
        )
    kept = {name: value for name, value in os.environ.items() if name not in agent.unset}
    words = [agent.command, *agent.arguments(target), *arguments]
    os.execve(program, words, kept | agent.environment(target))
