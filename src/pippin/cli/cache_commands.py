"""`pippin cache`: what a running server's prefix cache holds."""

from __future__ import annotations


def cache(*, url: str = "http://127.0.0.1:8000", flush: bool = False) -> None:
    """Show what a running server holds in its prefix cache.

    Parameters
    ----------
    url
        The server.
    flush
        Drop everything that no running request needs.
    """
    from pippin.client import show_cache

    show_cache(url, flush=flush)
