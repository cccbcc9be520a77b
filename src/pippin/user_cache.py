"""Where Pippin keeps what it can make again: a directory of the user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        home = os.path.expanduser("~")  # unlike Path.home, answers also where there is none
        cache = os.path.join(home, "Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(cache, "pippin")
