"""Access control: by the Host, the Origin and the key of a request.

Host     a name that only a tricked resolver leads here is refused (DNS rebinding), unless the
         request has a key, which such a page cannot know
Origin   a page of another site is refused, unless --cors-origin names it, or it is a page from this
         machine and the path is one for these. Where a browser sends no Origin, Sec-Fetch-Site has
         the site of the page
key      a bearer token, if the server has keys; not for probes of its health, nor for public paths
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.http.answers import HEADER, IGNORED_HEADER, ErrorResponse
from pippin.api.requests.body import salt_of_owner
from pippin.config import ServerConfig
from pippin.errors import LoadError, PippinError


class Keys:
    """A server's keys by their digests, each of which is an owner. Comparing takes equally long for
    every key.

    Admins have an admin key, or the only API key of a server without one; without API keys every
    client is one.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.owners = _digests((*config.api_key, *config.admin_key))
        alone = () if len(self.owners) > 1 else config.api_key
        self._admins = _digests(config.admin_key or alone)
        self.are_needed = bool(config.api_key)
        # Whether requests of different keys share no cached prefix:
        self.separates = len(self.owners) > 1 and not config.share_prefixes

    def owner(self, key: str) -> bytes | None:
        """The digest of a known key, from a header as starlette decodes it."""
        given = _digest(key.strip().encode("latin-1"))
        return given if _is_among(given, self.owners) else None

    def state_of(self, owner: bytes) -> dict[str, bytes]:
        """What the requests of an owner carry."""
        return {"owner": owner, "salt": salt_of_owner(owner) if self.separates else b""}

    def is_admin(self, scope: Scope) -> bool:
        return not self.are_needed or _is_among(owner_of(scope), self._admins)

    def check_admin(self, scope: Scope) -> None:
        if self.is_admin(scope):
            return
        if self._admins:
            raise PippinError(
                "this needs the admin key of this server (--admin-key), not an API key",
                code="admin_key_required",
            )
        raise PippinError(
            "this needs an admin key, and this server has several API keys and no admin key: set "
            "one with --admin-key-file, --admin-key or PIPPIN_ADMIN_KEY, and send it as the key",
            code="admin_key_required",
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _digests(keys: Iterable[str]) -> list[bytes]:
    return list(dict.fromkeys(_digest(key.encode()) for key in keys))


def _is_among(owner: bytes, digests: Iterable[bytes]) -> bool:
    same = [hmac.compare_digest(owner, digest) for digest in digests]
    return any(same)


def owner_of(scope: Scope) -> bytes:
    """Whose request it is. Without keys all are one."""
    owner: bytes = scope["state"].get("owner", b"")
    return owner


def network_of(host: str) -> str:
    """A client's address, or the first 64 bits of one of IPv6, whose others it chooses itself."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def client_of(scope: Scope) -> bytes | str:
    """Who may have a share of what all clients use: the owner of a key, or else an address."""
    return owner_of(scope) or network_of((scope.get("client") or ("",))[0])


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries, as OpenAI's or as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def read_key_file(path: str) -> tuple[str, ...]:
    """One key a line, except empty lines and those that begin with #."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read the file of keys {path}: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise LoadError(f"the file of keys {path} is empty: write one key per line")
    return keys


log = logging.getLogger(__name__)

ANY = "*"
LOOPBACK_ORIGIN = r"https?://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
OWN_SITE = ("same-origin", "none")  # none: the address was typed


class AccessControl:
    """The checks of every request, and CORS's headers, with which browsers show replies to pages.

    Hosts: addresses and localhost always pass, as no resolver is involved. No public resolver has
    names in .internal, which containers use for their host.
    Origins: pages of this server, those that were named, and on `is_local` paths those of this
    machine. No other site's page can have one of these.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        public: frozenset[str] = frozenset(),
        is_local: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """`public` paths need no key."""
        self._app = app
        self._keys = Keys(config)
        self._public = public
        self._is_local = is_local
        self._hosts = {"localhost", "*.internal", config.host.lower()}
        self._hosts |= set(map(str.lower, config.allowed_host))
        bound = _address(config.host)
        if config.host == "" or (bound is not None and bound.is_unspecified):
            own = socket.gethostname().lower()
            self._hosts |= {own, f"{own}.local"}
        self._allows_all = ANY in config.cors_origin
        named = [re.escape(origin).replace(r"\*", ".*") for origin in config.cors_origin]
        # by whether pages of this machine may use a path
        self._origins = {False: "|".join(named), True: "|".join([*named, LOOPBACK_ORIGIN])}
        self._with_headers = {local: self._cors(regex) for local, regex in self._origins.items()}

    def _cors(self, pattern: str) -> CORSMiddleware:
        return CORSMiddleware(
            self._call_checked,
            allow_origins=[ANY] if self._allows_all else (),
            allow_origin_regex=pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[HEADER, IGNORED_HEADER, "retry-after"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self.check_host(Headers(scope=scope))
        except PippinError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        await self._with_headers[self._is_local(scope["path"])](scope, receive, send)

    async def _call_checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            self._check_origin(scope, headers)
            if self._keys.are_needed and scope["path"] not in self._public:
                owner = self._keys.owner(key_in(headers))
                if owner is None:
                    raise PippinError(
                        "the API key is missing or wrong: send it as a bearer token, or as "
                        "x-api-key",
                        code="invalid_api_key",
                    )
                scope["state"].update(self._keys.state_of(owner))
        except PippinError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def check_host(self, headers: Headers) -> None:
        given = headers.get("host")
        if given is None:  # no browser leaves it out, and HTTP/1.1 does not allow to
            return
        host = host_of(given)
        known = _address(host) is not None or any(_matches(host, name) for name in self._hosts)
        if not known and not (self._keys.are_needed and self._keys.owner(key_in(headers))):
            raise PippinError(
                f"the Host {given[:100]!r} is not a name of this server; "
                "allow it with --allowed-host",
                code="forbidden",
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Browsers send the site of a page. Images, scripts, links and forms of another site carry
        no Origin, or none on a GET: what they request is refused by Sec-Fetch-Site, except for a
        link to the page at /."""
        origin = headers.get("origin")
        pattern = self._origins[self._is_local(scope["path"])]
        if self._allows_all or (origin is not None and re.fullmatch(pattern, origin)):
            return
        site = headers.get("sec-fetch-site", "none")  # programs send none of these headers
        if site not in OWN_SITE and not _leads_to_the_page(scope, headers):
            raise PippinError(
                f"this request is from a page of another site (Sec-Fetch-Site: {site[:100]!r}); "
                "allow the site with --cors-origin",
                code="forbidden",
            )
        if origin is None:
            return
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            raise PippinError(
                f"pages of {origin[:100]!r} may not use this server; allow them with --cors-origin",
                code="forbidden",
            )


def warn_if_open(config: ServerConfig) -> None:
    if not config.api_key and not is_loopback(config.host):
        log.warning(
            "listening on %s without an API key: any client that can reach this machine can use "
            "the model (set --api-key-file)",
            config.host,
        )


def owner_salt_of(scope: Scope) -> bytes:
    """What separates the prefixes of its owner from those of others; empty: nothing does."""
    salt: bytes = scope["state"].get("salt", b"")
    return salt


def host_of(given: str) -> str:
    """A Host header without its port, in lower case, and an address without brackets."""
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:  # brackets that hold no address
        return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    return host == "localhost" or ((found := _address(host)) is not None and found.is_loopback)


def shows_prompts(config: ServerConfig) -> bool:
    """Whether clients may read the prompts of others. `auto`: if there is one client."""
    if config.show_prompts != "auto":
        return config.show_prompts == "on"
    return len(Keys(config).owners) == 1 or (not config.api_key and is_loopback(config.host))


def check_downloads(config: ServerConfig, scope: Scope) -> None:
    """Whether a client may fill and free this machine's disk. `auto`: an admin; where no key is
    set, a client on this machine."""
    if config.allow_pull == "off":
        raise PippinError(
            "this server downloads and deletes no models (--allow-pull)", code="forbidden"
        )
    if config.api_key:
        Keys(config).check_admin(scope)
    elif config.allow_pull == "auto" and not _is_local(scope):
        raise PippinError(
            "without keys only clients on the server's own machine may download and delete models: "
            "set an API key (--api-key-file), or --allow-pull on",
            code="forbidden",
        )


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine; through a proxy on it, all clients are."""
    host: str = (scope.get("client") or ("",))[0]
    return is_loopback(host.removeprefix("::ffff:"))  # of IPv4 at an IPv6 socket


def _leads_to_the_page(scope: Scope, headers: Headers) -> bool:
    """Whether a browser was sent here by a link, in a tab of its own."""
    return (
        scope["method"] == "GET"
        and scope["path"] == "/"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in (ANY, host)
