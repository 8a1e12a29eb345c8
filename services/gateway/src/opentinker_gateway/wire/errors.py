"""Errors as OpenAI's clients know them: status, and `{"error": {message, type, param, code}}`."""

import json
from dataclasses import dataclass, field
from typing import Any

import grpc

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON = {Reason.UNKNOWN_MODEL: 404, Reason.MESSAGE_TOO_LARGE: 413, Reason.INVALID_STATE: 409}
_NO_MODEL = (
    Reason.UNKNOWN_MODEL,
    Reason.POLICY_NOT_FOUND,
    Reason.VERSION_NOT_FOUND,
    Reason.CHECKPOINT_NOT_FOUND,
    Reason.DEPLOYMENT_NOT_FOUND,
)
_CODES = {
    Reason.UNAUTHENTICATED: "invalid_api_key",
    Reason.PROMPT_TOO_LONG: "context_length_exceeded",
    Reason.QUOTA_EXCEEDED: "insufficient_quota",
    Reason.OVERLOADED: "rate_limit_exceeded",
    **dict.fromkeys(_NO_MODEL, "model_not_found"),
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error on its way out."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def event(self) -> bytes:
        """As an event of a stream that has begun, where no status can tell it any more."""
        return b"data: " + json.dumps(self.body, ensure_ascii=False).encode() + b"\n\n"


def http_error(error: ServiceError, *, chat: bool = False) -> HttpError:
    """The error as HTTP says it. `chat`: the request's prompt was made from `messages`."""
    status = _STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    body = {
        "error": {
            "message": error.message,
            "type": kind,
            "param": _param(error, chat),
            "code": _CODES.get(error.reason, error.reason.lower()),
            # Ours, for who knows our catalogue: several reasons have one code of OpenAI's.
            "reason": str(error.reason),
        }
    }
    return HttpError(status, body, headers)


def _param(error: ServiceError, chat: bool) -> str | None:
    """The field as the caller knows it."""
    if error.reason in _NO_MODEL:
        return "model"
    path = next((path for path, _ in error.violations if path), None)
    if path is None:
        return None
    path = path.removeprefix("sample.").removeprefix("params.")
    if path == "json_schema":
        return "response_format"
    return "messages" if chat and path == "prompt" else path
