"""Who calls, and what they may: deny by default, one entry for each method.

Two keys exist from the first start on: the bootstrap key (an admin of project `default`) and the service key
(our own servers). Keys of users are known to the scheduler, which other servers ask (`accounts`). A job token
says for which job a call is made. Only hashes stay in memory. Permission is checked before a request is
parsed, and so before anything is looked up.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from opentinker_kit.errors import ServiceError
from opentinker_kit.job_tokens import TokenVerifier
from opentinkerapi.runtime.channels import AUTHORIZATION, JOB_TOKEN
from opentinkerapi.runtime.reasons import Reason

DEFAULT_PROJECT = "default"
"""The project that a cluster begins with; its admins are the cluster's."""


class Role(StrEnum):
    """What somebody may do in a project; each may do what those before it may."""

    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return list(Role).index(self)


class Access(StrEnum):
    """Who may call a method."""

    ANYONE = "anyone"
    """Without a key: health checks."""
    CALLER = "caller"
    """Any key, of a viewer too, or the service key."""
    MEMBER = "member"
    """A member's or admin's key, or the service key."""
    ADMIN = "admin"
    """An admin's key, or the service key."""
    SERVICE = "service"
    """The service key only."""
    JOB = "job"
    """Who holds the token of a job; where tokens are not required, a member too."""


_LEAST_ROLE = {
    Access.CALLER: Role.VIEWER,
    Access.MEMBER: Role.MEMBER,
    Access.ADMIN: Role.ADMIN,
    Access.JOB: Role.MEMBER,
}


class Kind(StrEnum):
    """What kind of credential a call came with."""

    ANONYMOUS = "anonymous"
    CALLER = "caller"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes the current call. The project is taken from the credential, never from a request."""

    kind: Kind
    project: str = DEFAULT_PROJECT
    role: Role = Role.ADMIN
    user: str = ""
    """Id of the user; empty for the bootstrap key."""
    api_key: str = ""
    """Id of the user's key."""
    job: str = ""
    """`jobs/{job}` of the token that the call came with, where tokens are checked."""
    job_attempt: int = 0
    """The job's attempt when that token was made."""
    job_token: str = field(default="", repr=False)

    @property
    def is_service(self) -> bool:
        return self.kind is Kind.SERVICE

    @property
    def is_cluster_admin(self) -> bool:
        """Whether it may make users and projects, and look at all of them."""
        admin = self.kind is Kind.CALLER and self.role is Role.ADMIN and not self.job
        return self.is_service or (admin and self.project == DEFAULT_PROJECT)

    @property
    def scope(self) -> str | None:
        """The project whose resources it sees; None: all, for our own servers."""
        return None if self.is_service else self.project

    @property
    def caller(self) -> str:
        """What the audit log calls it."""
        if self.kind is not Kind.CALLER:
            return "service" if self.is_service else ""
        return f"users/{self.user}" if self.user else (self.job or "bootstrap")

    def may(self, access: Access) -> bool:
        """Whether it may call methods of this kind."""
        least = _LEAST_ROLE.get(access)
        return self.is_service or (
            self.kind is Kind.CALLER and least is not None and self.role.rank >= least.rank
        )


class KeySource(Protocol):
    """Knows the keys of users."""

    async def find(self, sha256: bytes) -> Principal | None:
        """Whose key has this hash; None if there is none. UNAUTHENTICATED, saying why, for one that works no
        more; SERVER_STARTING where nobody can be asked.
        """
        ...


_current: ContextVar[Principal] = ContextVar("principal")

OPEN_METHODS: Mapping[str, Access] = {
    "/grpc.health.v1.Health/Check": Access.ANYONE,
    "/grpc.health.v1.Health/Watch": Access.ANYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.CALLER,
}


def current_principal() -> Principal:
    """Who makes the call that this code runs for. LookupError outside a call."""
    return _current.get()


def acting_job() -> str:
    """The job that the current call is made for, `jobs/{job}`; empty where tokens are not required, for our
    own servers, and outside a call: who has no job to show may do what it asks for.
    """
    principal = _current.get(None)
    return principal.job if principal is not None else ""


def acting_attempt() -> int:
    """The attempt of that job when its token was made; 0 where there is none."""
    principal = _current.get(None)
    return principal.job_attempt if principal is not None else 0


def acting_project() -> str:
    """The project of that job; empty where there is none."""
    principal = _current.get(None)
    return principal.project if principal is not None and principal.job else ""


def set_principal(principal: Principal) -> None:
    """Set by the interceptor for the task that handles a call (and by tests that call handlers directly)."""
    _current.set(principal)


class AuthPolicy:
    """Decides from a call's metadata who calls, and whether they may.

    `methods` maps full method names (`/opentinkerapi.trainer.v1.TrainerService/Forward`) to who may call
    them; what is missing there may be called by nobody. `keys` knows the keys of users. With `tokens`, calls
    of `Access.JOB` need the token of a job, as metadata or in the request's `job_token`. Without keys every
    caller is trusted like a service: that is for servers on loopback in tests, and `build_server` refuses it
    elsewhere.
    """

    def __init__(
        self,
        bootstrap_key: str | None,
        service_key: str | None,
        methods: Mapping[str, Access | str],
        *,
        keys: KeySource | None = None,
        tokens: TokenVerifier | None = None,
    ) -> None:
        self._bootstrap = digest_of(bootstrap_key) if bootstrap_key else None
        self._service = digest_of(service_key) if service_key else None
        self._methods = {**OPEN_METHODS, **{name: Access(access) for name, access in methods.items()}}
        self._keys = keys
        self._tokens = tokens

    @property
    def has_keys(self) -> bool:
        """Whether both keys are set, so that callers are told apart."""
        return self._bootstrap is not None and self._service is not None

    @property
    def methods(self) -> Mapping[str, Access]:
        """Every method that may be called, with who may call it."""
        return self._methods

    async def authorize(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        """The principal of a call. ServiceError UNAUTHENTICATED or PERMISSION_DENIED if it may not be
        made.
        """
        principal = await self.identify(method, metadata)
        self.permit(method, principal)
        return principal

    async def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        """Who makes a call. UNAUTHENTICATED where that cannot be told and is needed."""
        if self._methods.get(method) is Access.ANYONE:
            return Principal(Kind.ANONYMOUS)
        pairs = {key.lower(): value for key, value in metadata if isinstance(value, str)}
        principal = await self._principal(pairs)
        if principal is None:
            given = AUTHORIZATION in pairs
            raise ServiceError(
                Reason.UNAUTHENTICATED,
                "the API key is wrong; check which cluster it belongs to"
                if given
                else "the API key is missing; send it as metadata 'authorization: Bearer <key>'",
            )
        return principal

    def permit(self, method: str, principal: Principal) -> None:
        """PERMISSION_DENIED unless the principal may call the method."""
        access = self._methods.get(method)
        if access is Access.ANYONE or (access is not None and principal.may(access)):
            return
        text = f"this key may not call {method}"
        if access is not None and access in _LEAST_ROLE:
            text = f"a {principal.role} may not call {method}; that takes a {_LEAST_ROLE[access]}"
        raise ServiceError(Reason.PERMISSION_DENIED, text)

    async def for_request(self, method: str, principal: Principal, request: Any) -> Principal:
        """The principal with the job that its request names by `job_token`, where tokens are required.

        The request's field goes before the metadata. UNAUTHENTICATED without any token.
        """
        if self._tokens is None or principal.is_service or self._methods.get(method) is not Access.JOB:
            return principal
        token = _token_in(request)
        if token and token != principal.job_token:
            return await self._of_job(principal, token)
        if not principal.job:
            text = "the call needs the token of a job (RenewJobLease gives it), as job_token or metadata"
            raise ServiceError(Reason.UNAUTHENTICATED, text, field="job_token")
        return principal

    async def for_message(self, method: str, principal: Principal, message: Any) -> Principal:
        """The principal of a further message of a stream: as `for_request` says, where the message has a
        `job_token`. STALE_ATTEMPT once the lease of the token that counts is over.
        """
        if "job_token" not in message.DESCRIPTOR.fields_by_name:
            return principal
        found = await self.for_request(method, principal, message)
        if found is principal and principal.job and self._tokens is not None:
            await self._tokens.verify(principal.job_token)
        return found

    async def _principal(self, pairs: Mapping[str, str]) -> Principal | None:
        token = pairs.get(JOB_TOKEN, "")
        if self._bootstrap is None and self._service is None:
            return Principal(Kind.SERVICE, job_token=token)
        scheme, _, key = pairs.get(AUTHORIZATION, "").partition(" ")
        digest = digest_of(key.strip()) if scheme.lower() == "bearer" else b""
        if self._service is not None and hmac.compare_digest(digest, self._service):
            return Principal(Kind.SERVICE, job_token=token)
        if token and self._tokens is not None:
            # It says enough: whose job, and that it may be used here.
            return await self._of_job(Principal(Kind.CALLER), token)
        if self._bootstrap is not None and hmac.compare_digest(digest, self._bootstrap):
            return Principal(Kind.CALLER, job_token=token)
        found = await self._keys.find(digest) if digest and self._keys is not None else None
        return None if found is None else replace(found, job_token=token)

    async def _of_job(self, principal: Principal, token: str) -> Principal:
        assert self._tokens is not None
        claims = await self._tokens.verify(token)
        return replace(
            principal,
            project=claims.project,
            role=Role.MEMBER,
            job=claims.job,
            job_attempt=claims.attempt,
            job_token=token,
        )


def digest_of(key: str) -> bytes:
    """What of a key may be kept."""
    return hashlib.sha256(key.encode()).digest()


def _token_in(request: Any) -> str:
    """The `job_token` of a request, or of the request that it wraps (StreamSample)."""
    fields = request.DESCRIPTOR.fields_by_name
    if "job_token" in fields:
        return str(request.job_token)
    return str(request.sample.job_token) if "sample" in fields else ""
