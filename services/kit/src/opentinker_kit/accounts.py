"""What the scheduler knows of keys, of job tokens and of who owns what, for the other servers.

Asked with the service key, and remembered for a while. A revoked key is refused here within `FRESH_S`. Where
the scheduler does not answer, what it said before counts for up to `STALE_S`.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from opentinker_kit.auth import (
    Access,
    AuthPolicy,
    Kind,
    Principal,
    Role,
    acting_job,
    current_principal,
)
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.job_tokens import TokenVerifier
from opentinker_kit.settings import ServerSettings
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tls import TlsFiles, explained
from opentinkerapi.scheduler.v1 import account_pb2, account_service_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceStub

FRESH_S = 10.0
STALE_S = 600.0
_DEADLINE_S = 5.0
_REMEMBERED = 4096

ROLES: Mapping[int, Role] = {
    account_pb2.ROLE_VIEWER: Role.VIEWER,
    account_pb2.ROLE_MEMBER: Role.MEMBER,
    account_pb2.ROLE_ADMIN: Role.ADMIN,
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was said of a key, and when."""

    principal: Principal | None
    refusal: str
    time: float


class RemoteAccounts:
    """The scheduler's accounts. `locate` says where the scheduler is now, `tls` how it is called."""

    def __init__(
        self,
        locate: Callable[[], str],
        service_key: str | None,
        clock: Clock,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        self._locate = locate
        self._tls = tls
        self._service_key = service_key
        self._clock = clock
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._opening = asyncio.Lock()
        self._keys: OrderedDict[bytes, _Answer] = OrderedDict()
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def find(self, sha256: bytes) -> Principal | None:
        """See `auth.KeySource`."""
        now = self._clock.monotonic()
        known = self._keys.get(sha256)
        if known is None or now - known.time > FRESH_S:
            try:
                known = await self._ask(sha256, now)
            except ServiceError:
                if known is None or now - known.time > STALE_S:
                    raise
            else:
                _remember(self._keys, sha256, known)
        if known.refusal:
            raise ServiceError(Reason.UNAUTHENTICATED, known.refusal)
        return known.principal

    async def token_keys(self) -> Mapping[str, bytes]:
        """The public keys of job tokens, by id."""
        async with self._asking() as channel:
            request = account_service_pb2.ListTokenKeysRequest()
            answer = await AccountServiceStub(channel).ListTokenKeys(request, timeout=_DEADLINE_S)
        return {key.id: key.public_key for key in answer.keys}

    async def project_of(self, policy: str) -> str | None:
        """The project that owns a policy, which never changes; None if there is no such policy."""
        if policy in self._owners:
            return self._owners[policy]
        try:
            async with self._asking() as channel:
                request = catalog_service_pb2.GetPolicyRequest(name=policy)
                answer = await CatalogServiceStub(channel).GetPolicy(request, timeout=_DEADLINE_S)
        except ServiceError as error:
            if error.reason is Reason.POLICY_NOT_FOUND:
                return None
            raise
        _remember(self._owners, policy, answer.policy.project)
        return str(answer.policy.project)

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, sha256: bytes, now: float) -> _Answer:
        try:
            async with self._asking() as channel:
                request = account_service_pb2.ResolveApiKeyRequest(sha256=sha256)
                answer = await AccountServiceStub(channel).ResolveApiKey(request, timeout=_DEADLINE_S)
        except ServiceError as error:
            if error.reason is not Reason.UNAUTHENTICATED:
                raise
            return _Answer(None, error.message, now)
        caller = answer.caller
        principal = Principal(
            Kind.CALLER,
            project=caller.project.removeprefix("projects/"),
            role=ROLES[caller.role],
            user=caller.caller.removeprefix("users/"),
            api_key=caller.api_key.removeprefix("apiKeys/"),
        )
        return _Answer(principal, "", now)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[grpc.aio.Channel]:
        """The channel for one question; what goes wrong as the scheduler's own error, or SERVER_STARTING."""
        try:
            yield await self._open()
        except grpc.RpcError as error:
            raise _reported(await explained(from_rpc_error(error), self._address, self._tls)) from None
        except (OSError, ValueError) as error:
            raise _unreachable(str(error)) from error

    async def _open(self) -> grpc.aio.Channel:
        async with self._opening:
            address = self._locate()
            if self._channel is None or address != self._address:
                if self._channel is not None:
                    await self._channel.close()
                self._channel = open_channel(address, key=self._service_key, tls=self._tls)
                self._address = address
            return self._channel


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may come in to a server that works for jobs."""

    auth: AuthPolicy
    accounts: RemoteAccounts | None
    """None where job tokens are not required."""

    async def close(self) -> None:
        if self.accounts is not None:
            await self.accounts.close()

    async def owns(self, policy: str) -> bool:
        """Whether a policy belongs to the project that the current call is made for."""
        if not acting_job() or self.accounts is None:
            return True
        return await self.accounts.project_of(policy) == current_principal().project


def gate(settings: ServerSettings, methods: Mapping[str, Access], audience: str, clock: Clock) -> Gate:
    """The door of a server that works for jobs, as its settings want it."""
    accounts, tokens = None, None
    if settings.require_job_tokens:
        accounts = RemoteAccounts(
            settings.resolve_scheduler_address, settings.service_key(), clock, tls=settings.peer_files()
        )
        tokens = TokenVerifier(audience, accounts.token_keys, clock)
    auth = AuthPolicy(settings.bootstrap_key(), settings.service_key(), methods, keys=accounts, tokens=tokens)
    return Gate(auth, accounts)


def _remember(store: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    store[key] = value
    store.move_to_end(key)
    if len(store) > _REMEMBERED:
        store.popitem(last=False)


def _reported(error: OpenTinkerError) -> ServiceError:
    known = Reason.__members__.get(error.reason or "")
    if known in (Reason.UNAUTHENTICATED, Reason.POLICY_NOT_FOUND):
        return ServiceError(Reason(known), error.message)
    return _unreachable(error.message)


def _unreachable(why: str) -> ServiceError:
    text = f"the scheduler cannot be asked who calls: {why}"
    return ServiceError(Reason.SERVER_STARTING, text, retry_after_s=1.0)
