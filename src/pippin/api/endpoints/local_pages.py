"""The paths that web pages from this machine may use, unless --cors-origin names their site.

They generate, embed, count and list models. Not among them: what concerns other clients (the cache,
/status, /events, stored responses, files) or changes the server. Knows no endpoint's work.
"""

from __future__ import annotations

LOCAL_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/infill"),
        *("/v1/responses", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/tokenize", "/detokenize"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/api/show", "/api/tags", "/api/ps", "/api/version"),
        *("/v1/models", "/health", "/ready"),
    }
)
_ONE_MODEL = "/v1/models/"


def is_local_path(path: str) -> bool:
    return path in LOCAL_PATHS or path.startswith(_ONE_MODEL)
