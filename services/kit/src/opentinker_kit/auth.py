"""Who calls, and what they may: deny by default, one entry for each method.

Two keys exist from the first start on: the bootstrap key (a person; until accounts exist it owns project
`default`) and the service key (our own servers). Only hashes stay in memory. Permission is checked before a
request is parsed, and so before anything is looked up.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.channels import AUTHORIZATION, JOB_TOKEN
from opentinkerapi.runtime.reasons import Reason


class Access(StrEnum):
    """Who may call a method."""

    ANYONE = "anyone"
    """Without a key: health checks."""
    CALLER = "caller"
    """A person's key, or the service key."""
    SERVICE = "service"
    """The service key only."""


class Kind(StrEnum):
    """What kind of credential a call came with."""

    ANONYMOUS = "anonymous"
    CALLER = "caller"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes the current call. The project is taken from the credential, never from a request."""

    kind: Kind
    project: str = "default"
    job_token: str = field(default="", repr=False)

    @property
    def is_service(self) -> bool:
        return self.kind is Kind.SERVICE


_current: ContextVar[Principal] = ContextVar("principal")

OPEN_METHODS: Mapping[str, Access] = {
    "/grpc.health.v1.Health/Check": Access.ANYONE,
    "/grpc.health.v1.Health/Watch": Access.ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.CALLER,
}


def current_principal() -> Principal:
    """Who makes the call that this code runs for. LookupError outside a call."""
    return _current.get()


def set_principal(principal: Principal) -> None:
    """Set by the interceptor for the task that handles a call (and by tests that call handlers directly)."""
    _current.set(principal)


class AuthPolicy:
    """Decides from a call's metadata who calls, and whether they may.

    `methods` maps full method names (`/opentinkerapi.trainer.v1.TrainerService/Forward`) to who may call
    them; what is missing there may be called by nobody. Without keys every caller is trusted like a service:
    that is for servers on loopback in tests, and `build_server` refuses it elsewhere.
    """

    def __init__(
        self,
        bootstrap_key: str | None,
        service_key: str | None,
        methods: Mapping[str, Access | str],
    ) -> None:
        self._bootstrap = _digest(bootstrap_key) if bootstrap_key else None
        self._service = _digest(service_key) if service_key else None
        self._methods = {**OPEN_METHODS, **{name: Access(access) for name, access in methods.items()}}

    @property
    def has_keys(self) -> bool:
        """Whether both keys are set, so that callers are told apart."""
        return self._bootstrap is not None and self._service is not None

    @property
    def methods(self) -> Mapping[str, Access]:
        """Every method that may be called, with who may call it."""
        return self._methods

    def authorize(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        """The principal of a call. ServiceError UNAUTHENTICATED or PERMISSION_DENIED if it may not be
        made.
        """
        pairs = {key.lower(): value for key, value in metadata if isinstance(value, str)}
        access = self._methods.get(method)
        principal = self._principal(pairs)
        if principal is None:
            if access is Access.ANYONE:
                return Principal(Kind.ANONYMOUS)
            given = AUTHORIZATION in pairs
            raise ServiceError(
                Reason.UNAUTHENTICATED,
                "the API key is wrong; check which cluster it belongs to"
                if given
                else "the API key is missing; send it as metadata 'authorization: Bearer <key>'",
            )
        if access is None or (access is Access.SERVICE and not principal.is_service):
            raise ServiceError(Reason.PERMISSION_DENIED, f"this key may not call {method}")
        return principal

    def _principal(self, pairs: Mapping[str, str]) -> Principal | None:
        token = pairs.get(JOB_TOKEN, "")
        if self._bootstrap is None and self._service is None:
            return Principal(Kind.SERVICE, job_token=token)
        scheme, _, key = pairs.get(AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(key.strip())
        if self._service is not None and hmac.compare_digest(digest, self._service):
            return Principal(Kind.SERVICE, job_token=token)
        if self._bootstrap is not None and hmac.compare_digest(digest, self._bootstrap):
            return Principal(Kind.CALLER, job_token=token)
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
