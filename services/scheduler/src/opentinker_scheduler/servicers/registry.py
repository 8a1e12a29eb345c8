"""ServerRegistryService: how servers join."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.registry import Registry
from opentinker_scheduler.application.sessions import Session
from opentinker_scheduler.wire import jobs as wire
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import server_registry_service_pb2 as pb
from opentinkerapi.scheduler.v1.server_registry_service_pb2_grpc import ServerRegistryServiceServicer


class ServerRegistryServicer(ServerRegistryServiceServicer):
    """For trainer and inference servers."""

    def __init__(self, registry: Registry, leases: Leases) -> None:
        self._registry = registry
        self._leases = leases

    async def RegisterServer(
        self, request: pb.RegisterServerRequest, context: Any
    ) -> pb.RegisterServerResponse:
        server = await self._registry.register(wire.read_registration(request))
        ttl = wire.duration(self._leases.server_ttl_s)
        return pb.RegisterServerResponse(server=server.name, attempt=server.attempt, lease_ttl=ttl)

    async def ServerSession(
        self, request: AsyncIterator[pb.ServerSessionRequest], context: Any
    ) -> AsyncIterator[pb.ServerSessionResponse]:
        first = await anext(aiter(request), None)
        if first is None or first.WhichOneof("message") != "hello":
            raise ServiceError(Reason.INVALID_FIELD, "the first message must be the hello", field="hello")
        session = await self._registry.open_session(first.hello.server, first.hello.attempt)
        reading = asyncio.create_task(self._read(session, request))
        try:
            async for message in session.messages():
                yield wire.write_down(message)
        finally:
            reading.cancel()
            self._registry.close_session(session)

    async def DeregisterServer(
        self, request: pb.DeregisterServerRequest, context: Any
    ) -> pb.DeregisterServerResponse:
        await self._registry.deregister(request.server, request.attempt, request.reason)
        return pb.DeregisterServerResponse()

    async def _read(self, session: Session, requests: AsyncIterator[pb.ServerSessionRequest]) -> None:
        """Take in what a server sends until it stops; what goes wrong ends its session, with the reason."""
        end: Exception | None = None
        try:
            async for request in requests:
                await self._take(session, request)
        except Exception as error:
            end = error
        session.close(end)

    async def _take(self, session: Session, request: pb.ServerSessionRequest) -> None:
        match request.WhichOneof("message"):
            case "renewal":
                renewal = request.renewal
                load = wire.read_load(renewal.load)
                tokens = list(map(wire.read_tokens, renewal.tokens))
                await self._registry.renewed(session, load, renewal.ready, renewal.failure, tokens)
            case "status":
                status = request.status
                state = wire.read_enum(wire.REPORTS, status.state, "status.state", "assignment state")
                await self._registry.reported(session, status.assignment, state, status.message)
            case other:
                raise ServiceError(Reason.INVALID_FIELD, f"unexpected message {other!r}", field="message")
