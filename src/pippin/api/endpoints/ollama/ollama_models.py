"""Ollama's endpoints about models: version, tags, show, ps, copy. Knows no field of a reply."""

from __future__ import annotations

from dataclasses import replace
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pippin.api.dialects.ollama.ollama_reply import rfc3339
from pippin.api.endpoints.app_state import AppState
from pippin.api.fields.ollama import COPY, LATEST, SHOW
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.request_log import record_of
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import shown
from pippin.api.served_models import ServedModel, ServedText

# Of Ollama. Clients refuse servers that are older than what they use: VS Code's Copilot asks for
# 0.6.4, `codex --oss` for 0.13.4 (Responses), agents that speak Messages for 0.14.2. All of that is
# here; what later versions added is not.
API_VERSION = "0.14.2"
NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded
GREETING = "Ollama is running"


class OllamaModels:
    def __init__(self, state: AppState) -> None:
        self._state = state

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
        models = [
            each | {"modified_at": rfc3339(model.info.created_s)}
            for model in self._state.models
            for each in _listed(model.info)
        ]
        return JSONResponse({"models": models})

    async def _ps(self, request: Request) -> Response:
        models = [
            each | _loaded(model)
            for model in self._state.models
            if model.residency.is_loaded
            for each in _listed(model.info)
        ]
        return JSONResponse({"models": models})

    async def _show(self, request: Request) -> Response:
        def show(fields: Any, served: ServedText) -> dict[str, Any]:
            body = served.rules.body(fields)
            SHOW.check(body, served.rules)
            record_of(request.scope).ignored = body.leniency.header()
            return _shown(served)

        return JSONResponse(await self._state.read(request, show))

    async def _copy(self, request: Request) -> Response:
        """A copy is another name, and names are set at start: one that is known is made already."""

        def check(fields: Any) -> None:
            rules, models = self._state.rules, self._state.models
            body = rules.body(fields)
            source = models.find(body.string("source", "")) or models.default
            COPY.check(body, replace(rules, model=source.info))
            name = body.required_string("destination")
            if models.find(name) is None:
                what = "is a new name, and names are set when the server starts: use --alias"
                raise body.error("destination", f"{shown(name.removesuffix(LATEST))} {what}")

        await self._state.read_json(request, check)
        return Response()


def _shown(served: ServedText) -> dict[str, Any]:
    text, model = served.text, served.model
    family = model.checkpoint.family
    capabilities = {
        "completion": True,
        "tools": text.formats.tools is not None,
        "insert": text.fill_in_middle is not None,
        "thinking": text.formats.reasoning is not None,
    }
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "" if text.chat is None else text.chat.source,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": [name for name, has_it in capabilities.items() if has_it],
        "modified_at": rfc3339(model.created_s),
    }


def _listed(model: ModelInfo) -> list[dict[str, Any]]:
    names = [name if ":" in name else name + LATEST for name in model.names]
    return [
        {
            "name": name,
            "model": name,
            "size": model.checkpoint.nbytes,
            "digest": model.checkpoint.digest,
            "details": _details(model),
        }
        for name in names
    ]


def _loaded(model: ServedModel) -> dict[str, Any]:
    left, info = model.residency.seconds_left, model.info
    return {
        "expires_at": NEVER if left is None else rfc3339(time() + left),
        "size_vram": model.residency.nbytes or info.checkpoint.nbytes,
        "context_length": info.max_len,
    }


def _details(model: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.checkpoint.family,
        "families": [model.checkpoint.family],
        "parameter_size": "",
        "quantization_level": model.checkpoint.quantization,
    }
