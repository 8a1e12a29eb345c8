"""The catalogue of reasons: what can go wrong, under which status, and what is said about it in public.

`Reason` mirrors `opentinkerapi.errors.v1.ErrorReason` without its prefix (a test keeps the two equal). A
reason belongs to exactly one status. The catalogue's message is the general one; most errors carry a more
exact one that names the numbers and the way out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import grpc


class Reason(StrEnum):
    """Why a call failed. Programs branch on this, never on a message."""

    INVALID_FIELD = "INVALID_FIELD"
    REQUIRED_FIELD = "REQUIRED_FIELD"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_ENVIRONMENT = "UNKNOWN_ENVIRONMENT"
    UNKNOWN_LOSS = "UNKNOWN_LOSS"
    UNSUPPORTED_OPTION = "UNSUPPORTED_OPTION"
    INVALID_SAMPLE = "INVALID_SAMPLE"
    NO_TRAINABLE_TOKENS = "NO_TRAINABLE_TOKENS"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    INVALID_PAGE_TOKEN = "INVALID_PAGE_TOKEN"
    INVALID_WEIGHTS = "INVALID_WEIGHTS"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    TLS_FAILED = "TLS_FAILED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    JOB_NOT_FOUND = "JOB_NOT_FOUND"
    SERVER_NOT_FOUND = "SERVER_NOT_FOUND"
    POLICY_NOT_FOUND = "POLICY_NOT_FOUND"
    VERSION_NOT_FOUND = "VERSION_NOT_FOUND"
    CHECKPOINT_NOT_FOUND = "CHECKPOINT_NOT_FOUND"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    BLOB_NOT_FOUND = "BLOB_NOT_FOUND"
    EPISODE_NOT_FOUND = "EPISODE_NOT_FOUND"
    GROUP_NOT_FOUND = "GROUP_NOT_FOUND"
    OPERATION_NOT_FOUND = "OPERATION_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    ENVIRONMENT_NOT_FOUND = "ENVIRONMENT_NOT_FOUND"
    TOKENIZER_NOT_FOUND = "TOKENIZER_NOT_FOUND"
    LOOP_STATE_NOT_FOUND = "LOOP_STATE_NOT_FOUND"
    DEPLOYMENT_NOT_FOUND = "DEPLOYMENT_NOT_FOUND"
    PROJECT_NOT_FOUND = "PROJECT_NOT_FOUND"
    USER_NOT_FOUND = "USER_NOT_FOUND"
    API_KEY_NOT_FOUND = "API_KEY_NOT_FOUND"
    SNAPSHOT_NOT_FOUND = "SNAPSHOT_NOT_FOUND"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    SEQ_REUSED = "SEQ_REUSED"
    ALREADY_REGISTERED = "ALREADY_REGISTERED"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    STALE_STEP = "STALE_STEP"
    INVALID_STATE = "INVALID_STATE"
    UNSUPPORTED_COMBINATION = "UNSUPPORTED_COMBINATION"
    CANNOT_BE_SATISFIED = "CANNOT_BE_SATISFIED"
    INCOMPLETE_BATCH = "INCOMPLETE_BATCH"
    MERGED_ONE_VERSION = "MERGED_ONE_VERSION"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    REPLAY_DIVERGED = "REPLAY_DIVERGED"
    STEP_OUT_OF_ORDER = "STEP_OUT_OF_ORDER"
    MISSING_DEPENDENCY = "MISSING_DEPENDENCY"
    SEQ_GAP = "SEQ_GAP"
    CANCELLED = "CANCELLED"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    OVERLOADED = "OVERLOADED"
    STORAGE_FULL = "STORAGE_FULL"
    SERVER_STARTING = "SERVER_STARTING"
    DRAINING = "DRAINING"
    ENGINE_CRASHED = "ENGINE_CRASHED"
    STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"
    CONNECTION_LOST = "CONNECTION_LOST"
    POISONED = "POISONED"
    ENV_CRASHED = "ENV_CRASHED"
    STEP_TIMEOUT = "STEP_TIMEOUT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    TIME_LIMIT = "TIME_LIMIT"
    IDLE_LIMIT = "IDLE_LIMIT"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the catalogue says about a reason."""

    code: grpc.StatusCode
    message: str


_Code = grpc.StatusCode

CATALOGUE: Mapping[Reason, Entry] = MappingProxyType(
    {
        Reason.INVALID_FIELD: Entry(
            _Code.INVALID_ARGUMENT, "a field has a value that is not allowed; see the named field"
        ),
        Reason.REQUIRED_FIELD: Entry(
            _Code.INVALID_ARGUMENT, "a required field is missing; see the named field"
        ),
        Reason.UNKNOWN_MODEL: Entry(_Code.INVALID_ARGUMENT, "the base model is not known here"),
        Reason.UNKNOWN_ENVIRONMENT: Entry(_Code.INVALID_ARGUMENT, "the environment is not known here"),
        Reason.UNKNOWN_LOSS: Entry(_Code.INVALID_ARGUMENT, "the loss is not known here"),
        Reason.UNSUPPORTED_OPTION: Entry(
            _Code.INVALID_ARGUMENT, "this server cannot honour an option; see the named field"
        ),
        Reason.INVALID_SAMPLE: Entry(
            _Code.INVALID_ARGUMENT, "a train sample is malformed; its index is in the metadata"
        ),
        Reason.NO_TRAINABLE_TOKENS: Entry(
            _Code.INVALID_ARGUMENT, "the batch has no trainable token; check the loss masks"
        ),
        Reason.PROMPT_TOO_LONG: Entry(
            _Code.INVALID_ARGUMENT, "the prompt is longer than the model's context; shorten it"
        ),
        Reason.INVALID_PAGE_TOKEN: Entry(
            _Code.INVALID_ARGUMENT, "the page token was not made by this method; start again without one"
        ),
        Reason.INVALID_WEIGHTS: Entry(_Code.INVALID_ARGUMENT, "the weights do not fit the model"),
        Reason.UNAUTHENTICATED: Entry(_Code.UNAUTHENTICATED, "the API key is missing or wrong"),
        Reason.TLS_FAILED: Entry(
            _Code.UNAUTHENTICATED, "no TLS connection: a certificate is missing or wrong, or one end has none"
        ),
        Reason.PERMISSION_DENIED: Entry(_Code.PERMISSION_DENIED, "this API key may not do that"),
        Reason.JOB_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such job"),
        Reason.SERVER_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such server"),
        Reason.POLICY_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such policy"),
        Reason.VERSION_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such policy version"),
        Reason.CHECKPOINT_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such checkpoint"),
        Reason.RUN_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such run"),
        Reason.BLOB_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such blob; upload it first"),
        Reason.EPISODE_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such episode, or its lease expired"),
        Reason.GROUP_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such group of episodes"),
        Reason.OPERATION_NOT_FOUND: Entry(
            _Code.NOT_FOUND, "there is no such operation, or its result was acknowledged"
        ),
        Reason.REQUEST_NOT_FOUND: Entry(_Code.NOT_FOUND, "nothing is held under that request id"),
        Reason.ENVIRONMENT_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such environment"),
        Reason.TOKENIZER_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no tokenizer file of that digest"),
        Reason.LOOP_STATE_NOT_FOUND: Entry(_Code.NOT_FOUND, "the run has no loop state yet"),
        Reason.DEPLOYMENT_NOT_FOUND: Entry(_Code.NOT_FOUND, "no such deployment"),
        Reason.PROJECT_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such project"),
        Reason.USER_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such user"),
        Reason.API_KEY_NOT_FOUND: Entry(_Code.NOT_FOUND, "there is no such API key"),
        Reason.SNAPSHOT_NOT_FOUND: Entry(
            _Code.NOT_FOUND, "there is no such snapshot, or nobody used it for long"
        ),
        Reason.REQUEST_ID_REUSED: Entry(
            _Code.ALREADY_EXISTS, "the request id was used with another request; make a new one"
        ),
        Reason.SEQ_REUSED: Entry(_Code.ALREADY_EXISTS, "the seq was used with another request"),
        Reason.ALREADY_REGISTERED: Entry(_Code.ALREADY_EXISTS, "it exists already, with another content"),
        Reason.STALE_ATTEMPT: Entry(
            _Code.FAILED_PRECONDITION, "a newer holder exists; resolve the endpoint anew"
        ),
        Reason.STALE_STEP: Entry(_Code.FAILED_PRECONDITION, "the loop state on record is newer"),
        Reason.INVALID_STATE: Entry(_Code.FAILED_PRECONDITION, "its state does not allow this"),
        Reason.UNSUPPORTED_COMBINATION: Entry(_Code.FAILED_PRECONDITION, "these options cannot go together"),
        Reason.CANNOT_BE_SATISFIED: Entry(_Code.FAILED_PRECONDITION, "this cluster can never offer that"),
        Reason.INCOMPLETE_BATCH: Entry(
            _Code.FAILED_PRECONDITION,
            "a ForwardBackward of this step failed, is missing or is extra; nothing was changed",
        ),
        Reason.MERGED_ONE_VERSION: Entry(
            _Code.FAILED_PRECONDITION,
            "a merged server serves one policy version; another one needs a second server",
        ),
        Reason.DIGEST_MISMATCH: Entry(_Code.DATA_LOSS, "stored bytes do not match their recorded hash"),
        Reason.REPLAY_DIVERGED: Entry(_Code.FAILED_PRECONDITION, "a replayed publish has another digest"),
        Reason.STEP_OUT_OF_ORDER: Entry(_Code.FAILED_PRECONDITION, "the step's seq is not the next one"),
        Reason.MISSING_DEPENDENCY: Entry(_Code.FAILED_PRECONDITION, "something this needs is not installed"),
        Reason.SEQ_GAP: Entry(
            _Code.ABORTED, "a seq stayed missing; the next one expected is in the metadata"
        ),
        Reason.CANCELLED: Entry(_Code.CANCELLED, "the call or its job was cancelled"),
        Reason.MESSAGE_TOO_LARGE: Entry(
            _Code.RESOURCE_EXHAUSTED,
            "the message is over 16 MiB; send it in chunks, or upload it and name it by a BlobRef",
        ),
        Reason.QUOTA_EXCEEDED: Entry(_Code.RESOURCE_EXHAUSTED, "a quota is used up"),
        Reason.OVERLOADED: Entry(_Code.RESOURCE_EXHAUSTED, "too much is in flight; come back later"),
        Reason.STORAGE_FULL: Entry(_Code.RESOURCE_EXHAUSTED, "the storage is full; nothing was changed"),
        Reason.SERVER_STARTING: Entry(_Code.UNAVAILABLE, "the server is still starting"),
        Reason.DRAINING: Entry(_Code.UNAVAILABLE, "the server is shutting down"),
        Reason.ENGINE_CRASHED: Entry(
            _Code.UNAVAILABLE, "the engine died under this call and is being restarted"
        ),
        Reason.STORAGE_UNAVAILABLE: Entry(
            _Code.UNAVAILABLE, "the object store or the database does not answer"
        ),
        Reason.CONNECTION_LOST: Entry(_Code.UNAVAILABLE, "the connection failed before an answer came"),
        Reason.POISONED: Entry(_Code.ABORTED, "the operation crashed the engine twice and was skipped"),
        Reason.ENV_CRASHED: Entry(_Code.ABORTED, "the environment raised, or its worker died"),
        Reason.STEP_TIMEOUT: Entry(_Code.DEADLINE_EXCEEDED, "the environment did not answer in time"),
        Reason.DEADLINE_EXCEEDED: Entry(_Code.DEADLINE_EXCEEDED, "the deadline passed before an answer came"),
        Reason.LAUNCH_FAILED: Entry(
            _Code.ABORTED, "a server could not be started; the tail of its log is in the metadata"
        ),
        Reason.TIME_LIMIT: Entry(_Code.DEADLINE_EXCEEDED, "the job held its slots for longer than it may"),
        Reason.IDLE_LIMIT: Entry(_Code.DEADLINE_EXCEEDED, "the job made no progress for longer than it may"),
        Reason.UNIMPLEMENTED: Entry(_Code.UNIMPLEMENTED, "this server does not have this method yet"),
        Reason.INTERNAL: Entry(_Code.INTERNAL, "a fault in the server; look up the error id in its log"),
    }
)
