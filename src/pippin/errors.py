"""All errors with a message for users: a table of codes, and classes of those caught by type.

PippinError
├── RequestError            the request is wrong; names the field and the numbers
│   ├── ContextOverflow     prompt + reply do not fit the model
│   ├── PoisonRequest       engines were lost while this same request was in flight
│   └── UnsupportedField    a documented field that this server does not honour
├── NotFound
│   └── ModelNotFound
├── Overloaded              the queue is full
├── OutOfMemory             one request does not fit the byte budget
├── EngineDead              the engine process ended, and its requests with it
│   └── DeviceFailed        several steps in a row failed: the engine stops
├── NotReady                loading, restarting or shutting down: try again
├── ConfigError             an option, a variable or a line of pippin.toml is wrong
└── LoadError               a checkpoint cannot be served; raised before the server starts
    ├── UnsupportedLayout   layers that Pippin cannot serve
    └── DiskCacheError      a cache directory is in use, or cannot be one
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 64  # of a client's own text
MAX_MESSAGE_CHARS = 4_000

# HTTP's status of an error by its code. Other codes are 500.
STATUSES = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "poison_request": 400,
    "unsupported_parameter": 400,
    "previous_response_not_found": 400,
    "storage_limit_exceeded": 400,
    "invalid_api_key": 401,
    "forbidden": 403,  # a Host, an Origin or a client that is not accepted
    "admin_key_required": 403,
    "not_found": 404,
    "model_not_found": 404,
    "response_not_found": 404,
    "file_not_found": 404,
    "batch_not_found": 404,
    "request_too_slow": 408,  # its head or its body
    "deadline_passed": 408,  # the reply was not complete in time
    "request_too_large": 413,
    "file_too_large": 413,
    "unsupported_media_type": 415,
    "too_many_connections": 429,
    "too_many_request_bodies": 429,
    "request_head_too_large": 431,
    "download_failed": 502,  # by the Hugging Face hub
    "overloaded": 503,
    "out_of_memory": 503,
    "engine_dead": 503,
    "device_failed": 503,
    "not_ready": 503,
    "storage_failed": 507,  # the disk is full, or cannot be written
}
RETRY_AFTER_S = {  # when the same request may do better
    "overloaded": 1,
    "too_many_connections": 1,
    "too_many_request_bodies": 1,
    "engine_dead": 5,
    "device_failed": 5,
    "not_ready": 5,
}


class PippinError(Exception):
    """Base of all errors that carry a message meant for the user."""

    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        param: str | None = None,
    ) -> None:
        """`status`: of a code that is not in the table, from another process."""
        self.message = cut(message, MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        self.code = code or self.code
        self.status = status or STATUSES.get(self.code, 500)
        self.retry_after_s = RETRY_AFTER_S.get(self.code)
        self.param = None if param is None else cut(param, 4 * MAX_SHOWN_CHARS)


class RequestError(PippinError):
    code = "invalid_request_error"


class ContextOverflow(RequestError):
    code = "context_length_exceeded"


class PoisonRequest(RequestError):
    code = "poison_request"


class UnsupportedField(RequestError):
    code = "unsupported_parameter"


class NotFound(PippinError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Overloaded(PippinError):
    code = "overloaded"


class OutOfMemory(PippinError):
    code = "out_of_memory"


class EngineDead(PippinError):
    code = "engine_dead"


class DeviceFailed(EngineDead):
    code = "device_failed"


class NotReady(PippinError):
    code = "not_ready"


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
    return PippinError(message, code=code, status=status)
