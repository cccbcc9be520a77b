"""`pippin pull`, `list` and `rm`: models in the Hugging Face hub's cache."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

HubId = Annotated[str, Parameter(help="Hugging Face id, such as Qwen/Qwen3.5-0.8B.")]
Json = Annotated[bool, Parameter(negative="")]


def pull(model: HubId, *, revision: str | None = None, json: Json = False) -> None:
    """Download a model from the Hugging Face hub, or what has changed of it since.

    Only files that `pippin serve` reads are downloaded, into the hub's own cache.

    Parameters
    ----------
    revision
        Branch, tag or commit. Default: the main branch.
    json
        Print the progress as lines of JSON, as /api/pull of Ollama's API does.
    """
    from pippin.hub.pull import pull, pull_as_lines

    if json:
        raise SystemExit(pull_as_lines(model, revision))
    print(f"{model} is at {pull(model, revision)}")


def list_models(*, json: Json = False) -> None:
    """List the models in the Hugging Face hub's cache, and whether they can be served.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from pippin.terminal.hub_cache import list_models

    list_models(as_json=json)


def rm(model: HubId, *, yes: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Delete a model from the Hugging Face hub's cache. A model that is being served is kept.

    Parameters
    ----------
    yes
        Delete without asking.
    """
    from pippin.terminal.hub_cache import remove_model

    remove_model(model, confirmed=yes)
