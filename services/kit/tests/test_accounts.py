"""What a server remembers of what the scheduler said of keys, and for how long."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from opentinker_kit.accounts import FRESH_S, STALE_S, RemoteAccounts
from opentinker_kit.auth import Role, digest_of
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import DETAILS_KEY, StatusData, encode
from opentinkerapi.scheduler.v1 import account_pb2, account_service_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import (
    AccountServiceServicer,
    add_AccountServiceServicer_to_server,
)

KEY = digest_of("a key")


class Scheduler(AccountServiceServicer):
    """Says of every key what a test wants."""

    def __init__(self) -> None:
        self.asked = 0
        self.refusal = ""

    async def ResolveApiKey(self, request: Any, context: Any) -> account_service_pb2.ResolveApiKeyResponse:
        self.asked += 1
        if self.refusal:
            code = CATALOGUE[Reason.UNAUTHENTICATED].code
            status = encode(StatusData(code=code, message=self.refusal, reason=Reason.UNAUTHENTICATED))
            await context.abort(
                code, self.refusal, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
            )
        caller = account_service_pb2.GetCallerResponse(
            caller="users/u1", project="projects/p1", role=account_pb2.ROLE_MEMBER, api_key="apiKeys/k1"
        )
        return account_service_pb2.ResolveApiKeyResponse(caller=caller)


class Rig:
    """A scheduler, and accounts that ask it."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.server = grpc.aio.server()
        add_AccountServiceServicer_to_server(self.scheduler, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.clock = ManualClock()
        self.accounts = RemoteAccounts(lambda: f"127.0.0.1:{self.port}", "service", self.clock)

    async def refused(self) -> ServiceError:
        with pytest.raises(ServiceError) as caught:
            await self.accounts.find(KEY)
        return caught.value


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.server.start()
    yield made
    await made.accounts.close()
    await made.server.stop(None)


async def test_a_key_is_asked_for_once_in_a_while(rig: Rig) -> None:
    for _ in range(5):
        found = await rig.accounts.find(KEY)
        assert found is not None
        assert (found.project, found.role, found.user, found.api_key) == ("p1", Role.MEMBER, "u1", "k1")
    assert rig.scheduler.asked == 1


async def test_a_revoked_key_is_refused_soon(rig: Rig) -> None:
    await rig.accounts.find(KEY)
    rig.scheduler.refusal = "the API key was revoked"
    await rig.clock.advance(FRESH_S + 1)
    error = await rig.refused()
    assert (error.reason, error.message) == (Reason.UNAUTHENTICATED, "the API key was revoked")
    # And that is not asked for each time either.
    await rig.refused()
    assert rig.scheduler.asked == 2


async def test_without_a_scheduler_what_it_said_counts_for_a_while(rig: Rig) -> None:
    await rig.accounts.find(KEY)
    await rig.server.stop(None)
    await rig.clock.advance(STALE_S - 1)
    assert await rig.accounts.find(KEY) is not None
    await rig.clock.advance(2)
    error = await rig.refused()
    assert (error.reason, error.retry_after_s) == (Reason.SERVER_STARTING, 1.0)
