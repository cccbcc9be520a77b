"""Who may use the routes that concern every owner: flush the cache, watch the engine.

Knows no route. Without API keys every request may; with keys, those that carry an admin key. The
only API key of a server without an admin key is one.
"""

from __future__ import annotations

from starlette.types import Scope

from pippin.api.http.access_control import owner_of
from pippin.api.http.http_errors import AdminOnly
from pippin.api.http.keys import ApiKeys, known_keys
from pippin.config import ServerConfig


class Admins:
    def __init__(self, config: ServerConfig) -> None:
        alone = () if len(known_keys(config)) > 1 else config.api_key
        self._keys = ApiKeys(config.admin_key or alone)
        self._open = not config.api_key

    def admit(self, scope: Scope) -> bool:
        return self._open or owner_of(scope) in self._keys

    def check(self, scope: Scope) -> None:
        """Raise for a request of another key."""
        if self.admit(scope):
            return
        if len(self._keys):
            raise AdminOnly("this needs the admin key of this server (--admin-key), not an API key")
        raise AdminOnly(
            "this needs an admin key, and this server has several API keys and no admin key: set "
            "one with --admin-key-file, --admin-key or PIPPIN_ADMIN_KEY, and send it as the key"
        )
