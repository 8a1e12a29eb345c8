"""google.rpc.Status to and from plain data: the one place that knows the layout of error details.

An error travels as `google.rpc.Status` in the trailing metadata `grpc-status-details-bin`: one ErrorInfo
(reason, domain `opentinker`, metadata), and where they apply BadRequest, RetryInfo and QuotaFailure. The same
message crosses the pipe between a server's front and its engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "opentinker"
DETAILS_KEY = "grpc-status-details-bin"
ERROR_ID = "error_id"
"""Metadata key under which an INTERNAL error carries the id of its log record."""

# Trailing metadata shares one 8 KiB limit of HTTP/2 peers in other languages; base64 adds a third.
MAX_MESSAGE_CHARS = 1500
MAX_VIOLATIONS = 12
MAX_TEXT_CHARS = 250

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class StatusData:
    """One error as plain data. `violations` are pairs of a field path and what is wrong with it."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[tuple[str, str]] = ()
    retry_after_s: float | None = None
    quota: Sequence[tuple[str, str]] = ()

    @property
    def error_id(self) -> str | None:
        """The id under which the server logged an INTERNAL error."""
        return self.metadata.get(ERROR_ID)


def encode(data: StatusData) -> Status:
    """Pack an error; texts beyond what trailing metadata can carry are cut, never dropped whole."""
    status = Status(code=data.code.value[0], message=_cut(data.message, MAX_MESSAGE_CHARS))
    if data.reason:
        info = ErrorInfo(reason=data.reason, domain=DOMAIN)
        for key, value in data.metadata.items():
            info.metadata[key] = _cut(value, MAX_TEXT_CHARS)
        status.details.add().Pack(info)
    if data.violations:
        bad = BadRequest()
        for path, text in data.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(field=_cut(path, MAX_TEXT_CHARS), description=_cut(text, MAX_TEXT_CHARS))
        status.details.add().Pack(bad)
    if data.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=data.retry_after_s))
        status.details.add().Pack(retry)
    if data.quota:
        failure = QuotaFailure()
        for subject, text in data.quota[:MAX_VIOLATIONS]:
            failure.violations.add(
                subject=_cut(subject, MAX_TEXT_CHARS), description=_cut(text, MAX_TEXT_CHARS)
            )
        status.details.add().Pack(failure)
    return status


def decode(status: Status) -> StatusData:
    """Unpack an error; details of other domains and unknown types are left out."""
    reason = ""
    metadata: dict[str, str] = {}
    violations: list[tuple[str, str]] = []
    quota: list[tuple[str, str]] = []
    retry_after_s: float | None = None
    for detail in status.details:
        kind = detail.TypeName()
        if kind == ErrorInfo.DESCRIPTOR.full_name:
            info = ErrorInfo()
            detail.Unpack(info)
            if info.domain == DOMAIN:
                reason, metadata = info.reason, dict(info.metadata)
        elif kind == BadRequest.DESCRIPTOR.full_name:
            bad = BadRequest()
            detail.Unpack(bad)
            violations += [(item.field, item.description) for item in bad.field_violations]
        elif kind == RetryInfo.DESCRIPTOR.full_name:
            retry = RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif kind == QuotaFailure.DESCRIPTOR.full_name:
            failure = QuotaFailure()
            detail.Unpack(failure)
            quota += [(item.subject, item.description) for item in failure.violations]
    return StatusData(
        code=_CODES.get(status.code, grpc.StatusCode.UNKNOWN),
        message=status.message,
        reason=reason,
        metadata=metadata,
        violations=tuple(violations),
        retry_after_s=retry_after_s,
        quota=tuple(quota),
    )


def from_trailers(trailers: Sequence[tuple[str, str | bytes]] | None) -> Status | None:
    """The Status that a server put into its trailing metadata, or None."""
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
