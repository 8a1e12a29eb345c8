"""The error that services raise on purpose, and its way onto the wire and back.

Domain code raises `ServiceError` with a reason of the catalogue and a message for the caller. The interceptor
of `server` maps it to google.rpc.Status; every other exception becomes INTERNAL with an error id. The same
mapping carries errors between a front and its engine child.
"""

import secrets
from collections.abc import Mapping, Sequence

import grpc
from google.rpc.status_pb2 import Status

from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import ERROR_ID, StatusData, decode, encode


class ServiceError(Exception):
    """A failure that the caller is meant to understand.

    `message` says what happened and what to do next; without one the catalogue's is used. `field` names the
    request's field that is at fault (`slots[0].base_model`); `violations` name several, each with its text.
    """

    def __init__(
        self,
        reason: Reason,
        message: str = "",
        *,
        field: str | None = None,
        metadata: Mapping[str, object] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[tuple[str, str]] = (),
        quota: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.reason = reason
        self.message = message or CATALOGUE[reason].message
        self.field = field
        self.violations = tuple(violations) or (((field, self.message),) if field is not None else ())
        self.metadata = {key: str(value) for key, value in (metadata or {}).items()}
        self.retry_after_s = retry_after_s
        self.quota = tuple(quota)
        super().__init__(f"{reason}: {self.message}")

    @property
    def code(self) -> grpc.StatusCode:
        """The status that the catalogue gives the reason."""
        return CATALOGUE[self.reason].code

    def to_status(self) -> Status:
        """The error as it travels."""
        return encode(
            StatusData(
                code=self.code,
                message=self.message,
                reason=self.reason,
                metadata=self.metadata,
                violations=self.violations,
                retry_after_s=self.retry_after_s,
                quota=self.quota,
            )
        )

    @classmethod
    def from_status(cls, status: Status) -> "ServiceError":
        """The error that travelled. A reason that this version does not know becomes INTERNAL."""
        data = decode(status)
        known = data.reason in Reason.__members__
        return cls(
            Reason(data.reason) if known else Reason.INTERNAL,
            data.message,
            metadata=data.metadata if known else {**data.metadata, "original_reason": data.reason},
            retry_after_s=data.retry_after_s,
            violations=data.violations,
            quota=data.quota,
        )


def new_error_id() -> str:
    """An id under which an unexpected failure is logged, and which its caller is told."""
    return secrets.token_hex(8)


def internal_error(error_id: str) -> ServiceError:
    """What a caller is told about an unexpected failure: where to find it, and nothing of its text."""
    message = f"a fault in the server; its log has the details under error id {error_id}"
    return ServiceError(Reason.INTERNAL, message, metadata={ERROR_ID: error_id})
