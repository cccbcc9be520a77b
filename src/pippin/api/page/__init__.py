"""The page's files as routes.

The files are public: a browser that opens an address has no key to send. They hold no data; what
the page shows comes from the API, which wants the key. No path is made of a request: every file
was read at start and has a route of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.http.answers import record_of

FILES = Path(__file__).parent / "files"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but this server's own files and its API, no inline script or style, no strings that
# become HTML (trusted types), and no other site's frame around it.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "cache-control": "no-cache",  # revalidated at each visit, mostly with a 304
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    path: str  # in the server's address
    content: bytes
    media_type: str
    etag: str

    async def send(self, request: Request) -> Response:
        record_of(request.scope).quiet = True  # one look at the page asks for dozens of files
        headers = {**HEADERS, "etag": self.etag}
        known = request.headers.get("if-none-match", "").split(",")
        if self.etag in (name.strip().removeprefix("W/") for name in known):  # W/: by a proxy
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


@cache
def page_files() -> tuple[PageFile, ...]:
    """`index.html` is `/`; `chat/reply.js` is `/page/chat/reply.js`."""
    found = []
    for file in sorted(FILES.rglob("*")):
        if file.suffix in MEDIA_TYPES:
            content, name = file.read_bytes(), file.relative_to(FILES).as_posix()
            path = "/" if name == "index.html" else f"/page/{name}"
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append(PageFile(path, content, MEDIA_TYPES[file.suffix], etag))
    return tuple(found)


def page_paths() -> frozenset[str]:
    return frozenset(file.path for file in page_files())


def page_routes() -> list[Route]:
    return [Route(file.path, file.send, include_in_schema=False) for file in page_files()]
