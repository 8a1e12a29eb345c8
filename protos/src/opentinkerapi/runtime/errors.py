"""What callers catch: one exception tree, each class also an instance of its stdlib kin.

    OpenTinkerError
    ├── InvalidArgument (ValueError)
    ├── OutOfRange (IndexError)
    ├── NotFound (LookupError)
    ├── AlreadyExists (ValueError)
    ├── FailedPrecondition (RuntimeError)
    ├── Aborted (RuntimeError)
    ├── PermissionDenied (PermissionError)
    ├── Unauthenticated (PermissionError), with TlsFailed
    ├── ResourceExhausted (RuntimeError)
    ├── Unavailable (ConnectionError)
    ├── DeadlineExceeded (TimeoutError)
    ├── Cancelled
    ├── Unimplemented (NotImplementedError)
    └── InternalError (RuntimeError), with DataLost

Below these stand classes for the reasons that programs branch on (`StaleAttempt`, `RequestIdReused` …). Which
status and reason becomes which class is one table, `CLASSES`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import grpc

from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import StatusData, decode, from_trailers


class OpenTinkerError(Exception):
    """Any failure of a call. `str()` of it is one readable paragraph; the attributes are for programs."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        violations: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        error_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """A `Reason`, or the text of one that this version does not know."""
        self.violations = tuple(violations)
        """Pairs of a field path and what is wrong with it."""
        self.field = field if field is not None else next((path for path, _ in self.violations), None)
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        """How long to wait before trying again, where the server says so."""
        self.error_id = error_id
        """Under which the server logged an internal error."""

    def __str__(self) -> str:
        parts = [self.message]
        parts += [
            f"{path}: {text}" if path else text for path, text in self.violations if text not in self.message
        ]
        if self.error_id and self.error_id not in self.message:
            parts.append(f"error id {self.error_id}")
        return "; ".join(parts)


class InvalidArgument(OpenTinkerError, ValueError):
    """The request is wrong whatever the state of the cluster; `field` names where."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class RequiredField(InvalidArgument):
    """A required field is missing."""


class UnknownModel(InvalidArgument):
    """The base model cannot be resolved; the message lists what can."""


class UnknownEnvironment(InvalidArgument):
    """The environment is not known; the message lists what is."""


class UnsupportedOption(InvalidArgument):
    """An option that this server, or this version, cannot honour."""


class InvalidSample(InvalidArgument):
    """A train sample is malformed; `metadata["index"]` says which."""


class PromptTooLong(InvalidArgument):
    """The prompt is longer than the model's context."""


class OutOfRange(OpenTinkerError, IndexError):
    """A position beyond the end."""

    code = grpc.StatusCode.OUT_OF_RANGE


class NotFound(OpenTinkerError, LookupError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class EpisodeNotFound(NotFound):
    """The episode is gone: closed, or its lease expired."""


class OperationNotFound(NotFound):
    """The trainer has no such operation, or its result was acknowledged."""


class AlreadyExists(OpenTinkerError, ValueError):
    """What the request makes exists with another content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class RequestIdReused(AlreadyExists):
    """The request id was used with another request."""


class SeqReused(AlreadyExists):
    """The seq of a policy was used with another operation."""


class FailedPrecondition(OpenTinkerError, RuntimeError):
    """The state of what the request names does not allow it; the same request may work later."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StaleAttempt(FailedPrecondition):
    """A newer holder exists; resolve the endpoint anew and send the same request there."""


class StaleStep(FailedPrecondition):
    """The loop state on record is newer."""


class IncompleteBatch(FailedPrecondition):
    """OptimStep would have stepped on half a gradient; nothing was changed."""


class UnsupportedCombination(FailedPrecondition):
    """Options that cannot go together."""


class CannotBeSatisfied(FailedPrecondition):
    """The cluster can never offer this; the message names the limit."""


class MissingDependency(FailedPrecondition):
    """Something is not installed; the message says how to install it."""


class Aborted(OpenTinkerError, RuntimeError):
    """The work was given up halfway."""

    code = grpc.StatusCode.ABORTED


class SeqGap(Aborted):
    """A seq stayed missing; `metadata["next_seq"]` is the one expected."""


class Poisoned(Aborted):
    """The operation crashed the engine twice and was skipped."""


class EnvironmentCrashed(Aborted):
    """The environment raised, or its worker died."""


class LaunchFailed(Aborted):
    """A server could not be started; `metadata["log_tail"]` holds the end of its log."""


class PermissionDenied(OpenTinkerError, PermissionError):
    """The key is valid and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(OpenTinkerError, PermissionError):
    """The key is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class TlsFailed(Unauthenticated):
    """Two ends do not agree on TLS, or a certificate is missing or wrong; the message says which."""


class ResourceExhausted(OpenTinkerError, RuntimeError):
    """Something is used up: a quota, memory, the room for a message."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class MessageTooLarge(ResourceExhausted):
    """The message is over 16 MiB; send it in chunks, or upload it and name it by a BlobRef."""


class QuotaExceeded(ResourceExhausted):
    """A quota is used up."""


class Overloaded(ResourceExhausted):
    """Too much is in flight; try again after `retry_after_s`."""


class StorageFull(ResourceExhausted):
    """The object store or a disk is full; nothing was changed."""


class Unavailable(OpenTinkerError, ConnectionError):
    """No answer came: the server is down, starting or stopping. The same request may be sent again."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(OpenTinkerError, TimeoutError):
    """The deadline passed before an answer came."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class StepTimeout(DeadlineExceeded):
    """The environment did not answer in time and was killed."""


class Cancelled(OpenTinkerError):
    """The call or its job was cancelled."""

    code = grpc.StatusCode.CANCELLED


class Unimplemented(OpenTinkerError, NotImplementedError):
    """The server does not have this method yet."""

    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(OpenTinkerError, RuntimeError):
    """A fault in the server; `error_id` finds it in the server's log."""

    code = grpc.StatusCode.INTERNAL


class DataLoss(InternalError):
    """Stored bytes are missing or do not match their recorded hash."""

    code = grpc.StatusCode.DATA_LOSS


_BY_CODE: dict[grpc.StatusCode, type[OpenTinkerError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        OutOfRange,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        Aborted,
        PermissionDenied,
        Unauthenticated,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unimplemented,
        InternalError,
        DataLoss,
        OpenTinkerError,
    )
}

_BY_REASON: dict[Reason, type[OpenTinkerError]] = {
    Reason.REQUIRED_FIELD: RequiredField,
    Reason.UNKNOWN_MODEL: UnknownModel,
    Reason.UNKNOWN_ENVIRONMENT: UnknownEnvironment,
    Reason.UNSUPPORTED_OPTION: UnsupportedOption,
    Reason.INVALID_SAMPLE: InvalidSample,
    Reason.PROMPT_TOO_LONG: PromptTooLong,
    Reason.TLS_FAILED: TlsFailed,
    Reason.EPISODE_NOT_FOUND: EpisodeNotFound,
    Reason.OPERATION_NOT_FOUND: OperationNotFound,
    Reason.REQUEST_ID_REUSED: RequestIdReused,
    Reason.SEQ_REUSED: SeqReused,
    Reason.STALE_ATTEMPT: StaleAttempt,
    Reason.STALE_STEP: StaleStep,
    Reason.INCOMPLETE_BATCH: IncompleteBatch,
    Reason.UNSUPPORTED_COMBINATION: UnsupportedCombination,
    Reason.CANNOT_BE_SATISFIED: CannotBeSatisfied,
    Reason.MISSING_DEPENDENCY: MissingDependency,
    Reason.SEQ_GAP: SeqGap,
    Reason.POISONED: Poisoned,
    Reason.ENV_CRASHED: EnvironmentCrashed,
    Reason.LAUNCH_FAILED: LaunchFailed,
    Reason.MESSAGE_TOO_LARGE: MessageTooLarge,
    Reason.QUOTA_EXCEEDED: QuotaExceeded,
    Reason.OVERLOADED: Overloaded,
    Reason.STORAGE_FULL: StorageFull,
    Reason.STEP_TIMEOUT: StepTimeout,
}

CLASSES: Mapping[tuple[grpc.StatusCode, Reason], type[OpenTinkerError]] = {
    (entry.code, reason): _BY_REASON.get(reason, _BY_CODE[entry.code]) for reason, entry in CATALOGUE.items()
}
"""Which status and reason becomes which class. A reason this version does not know falls back on its
status.
"""


def from_status_data(data: StatusData) -> OpenTinkerError:
    """The exception for an error that came as plain data."""
    reason: str | None = data.reason or None
    kind = _BY_CODE.get(data.code, OpenTinkerError)
    if data.reason in Reason.__members__:
        reason = Reason(data.reason)
        kind = CLASSES.get((data.code, Reason(data.reason)), kind)
    return kind(
        data.message,
        reason=reason,
        violations=data.violations,
        metadata=data.metadata,
        retry_after_s=data.retry_after_s,
        error_id=data.error_id,
    )


_ENDED_WITHOUT_STATUS = "Internal error from Core"
"""What grpc.aio says of it."""


def from_rpc_error(error: grpc.RpcError) -> OpenTinkerError:
    """The typed exception for a failed call; raise it `from None`.

    Failures that gRPC itself reports (no connection, deadline, size) carry no details and get our reasons
    here.
    """
    call: Any = error
    trailers = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
    status = from_trailers(tuple((key, value) for key, value in trailers or ()))
    if status is not None:
        return from_status_data(decode(status))
    code: grpc.StatusCode = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    text: str = (call.details() if hasattr(call, "details") else None) or str(error)
    return from_status_data(_of_grpc_itself(code, text))


def _of_grpc_itself(code: grpc.StatusCode, text: str) -> StatusData:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        message = f"{CATALOGUE[Reason.MESSAGE_TOO_LARGE].message} ({text})"
        return StatusData(code, message, Reason.MESSAGE_TOO_LARGE)
    if code is grpc.StatusCode.INTERNAL and text == _ENDED_WITHOUT_STATUS:
        # A call that had no status when its connection ended.
        code = grpc.StatusCode.UNAVAILABLE
    reasons = {
        grpc.StatusCode.UNAVAILABLE: Reason.CONNECTION_LOST,
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED: Reason.UNIMPLEMENTED,
    }
    reason = reasons.get(code)
    message = f"{CATALOGUE[reason].message} ({text})" if reason is not None else text
    return StatusData(code, message, reason or "")
