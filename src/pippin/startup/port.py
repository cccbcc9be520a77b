"""The socket that the server listens on, and what to do if its port is taken. Knows no requests."""

from __future__ import annotations

import errno
import socket

from pippin.config import ServerConfig
from pippin.errors import LoadError

NEXT_PORTS = 100  # tried in order for a free one
FIRST_UNPRIVILEGED = 1024


def listen(config: ServerConfig) -> socket.socket:
    """Before a model is downloaded or loaded: a port in use is an error at once."""
    listener = _new_socket(config.host)
    try:
        listener.bind((config.host, config.port))
        listener.listen()  # a client that reads the banner may connect at once
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {config.host}:{config.port}: {error.strerror}"
        raise LoadError(f"{reason}{_remedy(config, error)}") from error
    return listener


def _new_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name, since asyncio sends small pieces at once (TCP_NODELAY) only where it sees this.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def _remedy(config: ServerConfig, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            stop = "stop the program that uses this port"
            free = _free_port(config.host, config.port)
            return f": {stop}, or use a free one: --port {free}" if free else f": {stop}"
        case errno.EACCES if config.port < FIRST_UNPRIVILEGED:
            return f": ports below {FIRST_UNPRIVILEGED} need root: use --port 8000, for example"
        case errno.EADDRNOTAVAIL:
            return (
                ": this machine does not have that address: use --host 127.0.0.1 for local clients "
                "only, or --host 0.0.0.0 for all"
            )
    return ": check --host and --port"


def _free_port(host: str, taken: int) -> int | None:
    """The next one that can be bound now."""
    for port in range(taken + 1, min(taken + 1 + NEXT_PORTS, 65536)):
        with _new_socket(host) as probe:
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError:
                continue
            return port
    return None
