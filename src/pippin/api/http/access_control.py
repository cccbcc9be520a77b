"""Access control: by the Host, the Origin and the key of a request. Knows no route.

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
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.http.http_errors import AdminOnly, Forbidden, Unauthorized, error_response
from pippin.api.http.request_log import HEADER, IGNORED_HEADER, PROBES
from pippin.api.requests.body import salt_of_owner
from pippin.config import ServerConfig
from pippin.errors import LoadError, PippinError


class ApiKeys:
    """Keys, known by their digests: comparing takes equally long for every key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = list(dict.fromkeys(_digest(key.encode()) for key in keys))

    def __len__(self) -> int:
        return len(self._digests)

    def owners(self) -> list[bytes]:
        return list(self._digests)

    def __contains__(self, owner: bytes) -> bool:
        same = [hmac.compare_digest(owner, digest) for digest in self._digests]
        return any(same)

    def owner(self, key: str) -> bytes | None:
        """The digest of a known key, from a header as starlette decodes it."""
        given = _digest(key.strip().encode("latin-1"))
        return given if given in self else None


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


def known_keys(config: ServerConfig) -> ApiKeys:
    """API and admin keys: each is an owner."""
    return ApiKeys((*config.api_key, *config.admin_key))


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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Admins:
    """Without API keys every client is one; with keys, those that have an admin key.

    The only API key of a server without an admin key is one.
    """

    def __init__(self, config: ServerConfig) -> None:
        alone = () if len(known_keys(config)) > 1 else config.api_key
        self._keys = ApiKeys(config.admin_key or alone)
        self._open = not config.api_key

    def admit(self, scope: Scope) -> bool:
        return self._open or owner_of(scope) in self._keys

    def check(self, scope: Scope) -> None:
        if self.admit(scope):
            return
        if len(self._keys):
            raise AdminOnly("this needs the admin key of this server (--admin-key), not an API key")
        raise AdminOnly(
            "this needs an admin key, and this server has several API keys and no admin key: set "
            "one with --admin-key-file, --admin-key or PIPPIN_ADMIN_KEY, and send it as the key"
        )


log = logging.getLogger(__name__)

Check = Callable[[Scope], None]  # raises a PippinError
PathTest = Callable[[str], bool]
ANY = "*"
LOOPBACK_ORIGIN = r"https?://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
OWN_SITE = ("same-origin", "none")  # none: the address was typed


def access_checks(
    config: ServerConfig,
    public: frozenset[str] = frozenset(),
    for_local_pages: PathTest = lambda path: False,
) -> list[Middleware]:
    """The checks of every request, outermost first. `public` paths need no key."""
    keys = known_keys(config)
    origins = AllowedOrigins(config.cors_origin, for_local_pages)
    checks = [
        Middleware(Guard, check=HostCheck(config, keys)),
        Middleware(CorsHeaders, origins=origins),
        Middleware(Guard, check=OriginCheck(origins)),
    ]
    if config.api_key:
        check = KeyCheck(keys, PROBES | public, separates=separates_owners(config))
        checks.append(Middleware(Guard, check=check))
    return checks


class AllowedOrigins:
    """The origins whose pages may use this server, besides its own: those that were named, and on
    some paths those of this machine. No other site's page can have one of these."""

    def __init__(self, named: Iterable[str], for_local_pages: PathTest) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in named]
        self.named = "|".join(patterns)
        self.named_and_local = "|".join([*patterns, LOOPBACK_ORIGIN])
        self.for_local_pages = for_local_pages
        self.are_all = ANY in named

    def include(self, origin: str | None, path: str) -> bool:
        pattern = self.named_and_local if self.for_local_pages(path) else self.named
        return self.are_all or (origin is not None and bool(re.fullmatch(pattern, origin)))


class CorsHeaders:
    """Lets browsers show replies to the pages of allowed origins."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._origins = origins
        self._for_named = self._headers(app, origins.named)
        self._for_local = self._headers(app, origins.named_and_local)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_local = scope["type"] == "http" and self._origins.for_local_pages(scope["path"])
        await (self._for_local if is_local else self._for_named)(scope, receive, send)

    def _headers(self, app: ASGIApp, pattern: str) -> CORSMiddleware:
        return CORSMiddleware(
            app,
            allow_origins=[ANY] if self._origins.are_all else (),
            allow_origin_regex=pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[HEADER, IGNORED_HEADER, "retry-after"],
        )


def warn_if_open(config: ServerConfig) -> None:
    if not config.api_key and not is_loopback(config.host):
        log.warning(
            "listening on %s without an API key: any client that can reach this machine can use "
            "the model (set --api-key-file)",
            config.host,
        )


class Guard:
    def __init__(self, app: ASGIApp, check: Check) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except PippinError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Addresses and localhost always pass: no resolver is involved. No public resolver has names
    in .internal, which containers use for their host."""

    def __init__(self, config: ServerConfig, keys: ApiKeys) -> None:
        self._keys = keys if config.api_key else None
        self._names = {"localhost", "*.internal", config.host.lower()}
        self._names |= set(map(str.lower, config.allowed_host))
        if is_wildcard(config.host):
            own = socket.gethostname().lower()
            self._names |= {own, f"{own}.local"}

    def __call__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.get("host")
        if given is None:  # no browser leaves it out, and HTTP/1.1 does not allow to
            return
        host = host_of(given)
        known = is_address(host) or any(_matches(host, name) for name in self._names)
        if not known and not (self._keys and self._keys.owner(key_in(headers)) is not None):
            raise Forbidden(
                f"the Host {given[:100]!r} is not a name of this server; "
                "allow it with --allowed-host"
            )


class OriginCheck:
    """Browsers send the site of a page. Only this server's own pages and allowed ones are accepted.

    Images, scripts, links and forms of another site carry no Origin, or none on a GET: what they
    request is refused by Sec-Fetch-Site, except for a link to the page at /.
    """

    def __init__(self, allowed: AllowedOrigins) -> None:
        self._allowed = allowed

    def __call__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if self._allowed.include(origin, scope["path"]):
            return
        site = headers.get("sec-fetch-site", "none")  # programs send none of these headers
        if site not in OWN_SITE and not _leads_to_the_page(scope, headers):
            raise Forbidden(
                f"this request is from a page of another site (Sec-Fetch-Site: {site[:100]!r}); "
                "allow the site with --cors-origin"
            )
        if origin is None:
            return
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            raise Forbidden(
                f"pages of {origin[:100]!r} may not use this server; allow them with --cors-origin"
            )


class KeyCheck:
    def __init__(self, keys: ApiKeys, public: frozenset[str], *, separates: bool) -> None:
        """`separates`: requests of different keys share no cached prefix."""
        self._keys = keys
        self._public = public
        self._separates = separates

    def __call__(self, scope: Scope) -> None:
        if scope["path"] in self._public:
            return
        owner = self._keys.owner(key_in(Headers(scope=scope)))
        if owner is None:
            raise Unauthorized(
                "the API key is missing or wrong: send it as a bearer token, or as x-api-key"
            )
        scope["state"].update(owner_state(owner, separates=self._separates))


def separates_owners(config: ServerConfig) -> bool:
    """Whether requests of different keys share no cached prefix."""
    return len(known_keys(config)) > 1 and not config.share_prefixes


def owner_state(owner: bytes, *, separates: bool) -> dict[str, bytes]:
    """What the requests of an owner carry."""
    return {"owner": owner, "salt": salt_of_owner(owner) if separates else b""}


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


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    return host == "" or (is_address(host) and ipaddress.ip_address(host).is_unspecified)


def shows_prompts(config: ServerConfig) -> bool:
    """Whether clients may read the prompts of others. `auto`: if there is one client."""
    if config.show_prompts != "auto":
        return config.show_prompts == "on"
    return len(known_keys(config)) == 1 or (not config.api_key and is_loopback(config.host))


def check_downloads(config: ServerConfig, scope: Scope) -> None:
    """Whether a client may fill and free this machine's disk. `auto`: an admin; where no key is
    set, a client on this machine."""
    if config.allow_pull == "off":
        raise Forbidden("this server downloads and deletes no models (--allow-pull)")
    if config.api_key:
        Admins(config).check(scope)
    elif config.allow_pull == "auto" and not _is_local(scope):
        raise Forbidden(
            "without keys only clients on the server's own machine may download and delete models: "
            "set an API key (--api-key-file), or --allow-pull on"
        )


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine; through a proxy on it, all clients are."""
    host: str = (scope.get("client") or ("",))[0]
    return is_loopback(host.removeprefix("::ffff:"))  # of IPv4 at an IPv6 socket


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


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
