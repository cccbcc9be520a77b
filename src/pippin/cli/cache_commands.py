"""`pippin status` and `pippin cache`: a running server's state, and prefix caches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

cache = App(name="cache", help="Flush a server's prefix cache; show, verify or empty one on disk.")

CacheDir = Annotated[
    Path,
    Parameter(
        env_var="PIPPIN_CACHE_DIR", help="Directory of prefix caches, as in serve --cache-dir."
    ),
]
Url = Annotated[
    str | None,
    Parameter(
        help="Address of the server. Default: http://127.0.0.1:8000 if a server is ready there, "
        "otherwise the server that you started last."
    ),
]


def status(*, url: Url = None) -> None:
    """Print the state of a running server: its engine, requests, memory and prefix cache."""
    from pippin.terminal.server_status import show_status

    show_status(url)


@cache.default
def of_server(*, url: Url = None, flush: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print the state of a running server (old spelling of `pippin status`).

    Parameters
    ----------
    flush
        Flush the prefix cache first (old spelling of `pippin cache flush`).
    """
    from pippin.terminal.server_status import flush_cache, show_status

    old, new = ("cache --flush", "cache flush") if flush else ("cache", "status")
    print(
        f"pippin: `pippin {old}` is now `pippin {new}`; the next release removes the old spelling",
        file=sys.stderr,
    )
    if flush:
        flush_cache(url)
    show_status(url)


@cache.command
def flush(*, url: Url = None) -> None:
    """Delete everything from a running server's prefix cache that no running request uses."""
    from pippin.terminal.server_status import flush_cache

    flush_cache(url)


@cache.command
def show(*, cache_dir: CacheDir) -> None:
    """Print the size and the entries of a cache directory, by model. Its server may be running."""
    from pippin.terminal.cache_directory import show_directory

    show_directory(cache_dir)


@cache.command
def verify(*, cache_dir: CacheDir) -> None:
    """Read a cache directory and verify its checksums. Exit status 1 if an entry is damaged.

    Its server may be running. Nothing is changed: a server deletes damaged entries itself.
    """
    from pippin.terminal.cache_directory import verify_directory

    raise SystemExit(verify_directory(cache_dir))


@cache.command
def empty(*, cache_dir: CacheDir) -> None:
    """Delete everything from a cache directory that no running server uses.

    For the cache of a running server use `pippin cache flush`.
    """
    from pippin.terminal.cache_directory import empty_directory

    empty_directory(cache_dir)
