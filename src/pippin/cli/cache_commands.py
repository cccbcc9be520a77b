"""`pippin cache`: what a running server's prefix cache holds, and what a directory of one does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

cache = App(name="cache", help="Show, verify and empty prefix caches: a server's, or a directory.")

CacheDir = Annotated[
    Path, Parameter(env_var="PIPPIN_CACHE_DIR", help="A directory that servers keep caches in.")
]


@cache.default
def of_server(*, url: str = "http://127.0.0.1:8000", flush: bool = False) -> None:
    """Show what a running server holds in its prefix cache.

    Parameters
    ----------
    url
        The server.
    flush
        Drop everything that no running request needs.
    """
    from pippin.terminal.server_client import show_cache

    show_cache(url, flush=flush)


@cache.command
def show(*, cache_dir: CacheDir) -> None:
    """Show what a cache directory holds, by model. A server may run meanwhile."""
    from pippin.terminal.cache_directory import show_directory

    show_directory(cache_dir)


@cache.command
def verify(*, cache_dir: CacheDir) -> None:
    """Read everything in a cache directory. Exit status 1 if something is not what was written.

    A server may run meanwhile. Nothing is changed: a server drops what is damaged by itself.
    """
    from pippin.terminal.cache_directory import verify_directory

    raise SystemExit(verify_directory(cache_dir))


@cache.command
def empty(*, cache_dir: CacheDir) -> None:
    """Remove everything from a cache directory that no server uses now.

    To empty a running server's, use `pippin cache --flush`.
    """
    from pippin.terminal.cache_directory import empty_directory

    empty_directory(cache_dir)
