"""All errors with a message for users, as one tree. Knows no HTTP server, model or array.

PippinError
├── RequestError            400  the request is wrong; names the field and the numbers
│   ├── ContextOverflow     400  prompt + reply do not fit the model
│   ├── PoisonRequest       400  engines were lost while this same request was in flight
│   └── UnsupportedField    400  a documented field that this server does not honour
├── NotFound                404
├── DownloadFailed          502  the Hugging Face hub did not deliver a model
├── Overloaded              503  the queue is full
├── OutOfMemory             503  one request does not fit the byte budget
├── NotANumber              500  the model's values overflowed on this request
├── EngineDead              503  the engine process ended, and its requests with it
│   └── DeviceFailed        503  several steps in a row failed: the engine stops
├── NotReady                503  loading, restarting or shutting down: try again
├── ConfigError                  an option, a variable or a line of pippin.toml is wrong
└── LoadError                    a checkpoint cannot be served; raised before the server starts
    ├── UnsupportedLayout        layers that Pippin cannot serve
    └── DiskCacheError           a cache directory is in use, or cannot be one
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 64  # of a client's own text
MAX_MESSAGE_CHARS = 4_000


class PippinError(Exception):
    """Base of all errors that carry a message meant for the user."""

    status = 500
    code = "internal_error"
    retry_after_s: int | None = None  # when the same request may do better

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = cut(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.param = None if param is None else cut(param, 4 * MAX_SHOWN_CHARS)


class RequestError(PippinError):
    status = 400
    code = "invalid_request_error"


class ContextOverflow(RequestError):
    code = "context_length_exceeded"


class PoisonRequest(RequestError):
    code = "poison_request"


class UnsupportedField(RequestError):
    code = "unsupported_parameter"


class NotFound(PippinError):
    status = 404
    code = "not_found"


class DownloadFailed(PippinError):
    status = 502
    code = "download_failed"


class Overloaded(PippinError):
    status = 503
    code = "overloaded"
    retry_after_s = 1


class OutOfMemory(PippinError):
    status = 503
    code = "out_of_memory"


class NotANumber(PippinError):
    code = "not_a_number"


class EngineDead(PippinError):
    status = 503
    code = "engine_dead"
    retry_after_s = 5


class DeviceFailed(EngineDead):
    code = "device_failed"


class NotReady(PippinError):
    status = 503
    code = "not_ready"
    retry_after_s = 5


class ConfigError(PippinError, ValueError):
    """A wrong option; the message names the field and the value."""

    code = "invalid_config"


class LoadError(PippinError):
    code = "load_error"


class UnsupportedLayout(LoadError):
    code = "unsupported_layout"


class DiskCacheError(LoadError):
    code = "disk_cache"


def cut(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """The part of a client's text that an error echoes: names and values may have megabytes."""
    return text if len(text) <= most else text[: most - 1] + "…"


def error_of(message: str, code: str | None, status: int) -> PippinError:
    """The error that another process sent as a message, a code and a status."""
    kinds: list[type[PippinError]] = [PippinError]
    for kind in kinds:
        if kind.code == code:
            return kind(message)
        kinds += kind.__subclasses__()
    error = PippinError(message)
    error.code, error.status = code or PippinError.code, status
    return error
