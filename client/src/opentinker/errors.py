"""What the client raises: one exception tree, shared with the services' error catalogue.

Every failed call becomes a subclass of `OpenTinkerError` that is also an instance of its stdlib kin, so both
`except opentinker.errors.NotFound` and `except LookupError` work. The tree is drawn in
`opentinkerapi.runtime.errors`.
"""

from opentinkerapi.runtime.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    CannotBeSatisfied,
    DataLoss,
    DeadlineExceeded,
    EnvironmentCrashed,
    EpisodeNotFound,
    FailedPrecondition,
    IncompleteBatch,
    InternalError,
    InvalidArgument,
    InvalidSample,
    LaunchFailed,
    MessageTooLarge,
    MissingDependency,
    NotFound,
    OpenTinkerError,
    OperationNotFound,
    OutOfRange,
    Overloaded,
    PermissionDenied,
    Poisoned,
    PromptTooLong,
    QuotaExceeded,
    RequestIdReused,
    RequiredField,
    ResourceExhausted,
    SeqGap,
    SeqReused,
    StaleAttempt,
    StaleStep,
    StepTimeout,
    StorageFull,
    TlsFailed,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    UnknownEnvironment,
    UnknownModel,
    UnsupportedCombination,
    UnsupportedOption,
    from_rpc_error,
    from_status_data,
)
from opentinkerapi.runtime.reasons import Reason

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "CannotBeSatisfied",
    "DataLoss",
    "DeadlineExceeded",
    "EnvironmentCrashed",
    "EpisodeNotFound",
    "FailedPrecondition",
    "IncompleteBatch",
    "InternalError",
    "InvalidArgument",
    "InvalidSample",
    "JobEnded",
    "LaunchFailed",
    "LogprobMismatch",
    "MessageTooLarge",
    "MissingDependency",
    "NotFound",
    "OpenTinkerError",
    "OperationNotFound",
    "OutOfRange",
    "Overloaded",
    "PermissionDenied",
    "Poisoned",
    "PromptTooLong",
    "QuotaExceeded",
    "Reason",
    "RequestIdReused",
    "RequiredField",
    "ResourceExhausted",
    "SeqGap",
    "SeqReused",
    "StaleAttempt",
    "StaleStep",
    "StepTimeout",
    "StorageFull",
    "TemplateProblem",
    "TlsFailed",
    "TrainingStopped",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UnknownEnvironment",
    "UnknownModel",
    "UnsupportedCombination",
    "UnsupportedOption",
    "from_rpc_error",
    "from_status_data",
    "invalid",
    "unsupported",
]


class JobEnded(Aborted):
    """The job that a policy lives in has ended: failed, cancelled or finished by someone else."""


class LogprobMismatch(FailedPrecondition):
    """Trainer and sampler do not mean the same model: nothing was trained."""


class TrainingStopped(Aborted):
    """`fit()` gave up: nothing left to learn from, or too many steps without a finite gradient."""


class TemplateProblem(InvalidArgument):
    """The model's chat template cannot be trained with as asked: what it writes is not what would be
    sampled.
    """

    @classmethod
    def of(cls, problem: str) -> "TemplateProblem":
        """With a text that says what the template does."""
        return cls(problem, reason=Reason.INVALID_FIELD, field="messages")


def invalid(field: str, problem: str) -> InvalidArgument:
    """An argument has a value outside what it allows; `problem` says what is allowed."""
    return InvalidArgument(f"{field}: {problem}", reason=Reason.INVALID_FIELD, field=field)


def unsupported(field: str, problem: str) -> UnsupportedOption:
    """An option that this version does not have."""
    return UnsupportedOption(f"{field}: {problem}", reason=Reason.UNSUPPORTED_OPTION, field=field)
