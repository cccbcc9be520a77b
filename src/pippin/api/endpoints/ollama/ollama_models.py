"""Ollama's endpoints about models: version, tags, show, ps, copy. Knows no field of a reply."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pippin.api.dialects.ollama.ollama_reply import rfc3339
from pippin.api.endpoints.app_state import AppState
from pippin.api.fields.ollama import COPY, LATEST, SHOW
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.request_log import record_of
from pippin.api.requests.body import shown
from pippin.api.requests.leniency import Leniency

# Of Ollama. Clients refuse servers that are older than what they use: VS Code's Copilot asks for
# 0.6.4, `codex --oss` for 0.13.4 (Responses), agents that speak Messages for 0.14.2. All of that is
# here; what later versions added is not.
API_VERSION = "0.14.2"
NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded
GREETING = "Ollama is running"


class OllamaModels:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._model = state.model

    def routes(self) -> list[Route]:
        routes = [
            Route("/api/version", self._version),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._ps),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/copy", self._copy, methods=["POST"]),
        ]
        if not self._state.config.page:  # which is at / otherwise
            routes.append(Route("/", self._greet, include_in_schema=False))
        return routes

    async def _greet(self, request: Request) -> Response:
        return PlainTextResponse(GREETING)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": API_VERSION})

    async def _tags(self, request: Request) -> Response:
        modified = {"modified_at": rfc3339(self._model.created_s)}
        return JSONResponse({"models": [each | modified for each in self._models()]})

    async def _ps(self, request: Request) -> Response:
        loaded = {
            "expires_at": NEVER,
            "size_vram": self._model.checkpoint.nbytes,
            "context_length": self._model.max_len,
        }
        return JSONResponse({"models": [each | loaded for each in self._models()]})

    async def _show(self, request: Request) -> Response:
        def check(fields: Any) -> Leniency:
            body = self._state.rules.body(fields)
            SHOW.check(body, self._state.rules)
            if not body.has("name"):  # the older name of it
                body.require("model")
            return body.leniency

        record_of(request.scope).ignored = (await self._state.read(request, check)).header()
        return JSONResponse(self._shown())

    async def _copy(self, request: Request) -> Response:
        """A copy is another name, and names are set at start: one that is known is made already."""

        def check(fields: Any) -> None:
            body = self._state.rules.body(fields)
            COPY.check(body, self._state.rules)
            name = body.required_string("destination").removesuffix(LATEST)
            accepted = self._model.accepted_names
            if accepted is not None and name not in accepted:
                what = "is a new name, and names are set when the server starts: use --alias"
                raise body.error("destination", f"{shown(name)} {what}")

        await self._state.read(request, check)
        return Response()

    def _shown(self) -> dict[str, Any]:
        text, family = self._state.text, self._model.checkpoint.family
        capabilities = {
            "completion": True,
            "tools": text.formats.tools is not None,
            "insert": text.fill_in_middle is not None,
            "thinking": text.formats.reasoning is not None,
        }
        return {
            "modelfile": f"FROM {self._model.name}\n",
            "parameters": "",
            "template": "" if text.chat is None else text.chat.source,
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                "general.basename": self._model.name,
                f"{family}.context_length": self._model.max_len,
                f"{family}.vocab_size": self._model.vocab_size,
            },
            "capabilities": [name for name, has_it in capabilities.items() if has_it],
            "modified_at": rfc3339(self._model.created_s),
        }

    def _models(self) -> list[dict[str, Any]]:
        checkpoint = self._model.checkpoint
        names = [name if ":" in name else name + LATEST for name in self._model.names]
        return [
            {
                "name": name,
                "model": name,
                "size": checkpoint.nbytes,
                "digest": checkpoint.digest,
                "details": self._details(),
            }
            for name in names
        ]

    def _details(self) -> dict[str, Any]:
        checkpoint = self._model.checkpoint
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": checkpoint.family,
            "families": [checkpoint.family],
            "parameter_size": "",
            "quantization_level": checkpoint.quantization,
        }
