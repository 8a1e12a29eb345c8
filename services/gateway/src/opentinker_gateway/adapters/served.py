"""One model for one request: sampled on whoever serves it, and where that server is lost on the next one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import grpc.aio

from opentinker_gateway.adapters.channels import Channels, typed_failures
from opentinker_gateway.adapters.jobs import Served
from opentinker_gateway.adapters.resuming import Diverged, Resumed
from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.domain.prompts import ChatPrompts
from opentinker_gateway.domain.sampling import Event, SamplingOptions, Started, Waiting
from opentinker_gateway.wire import sampling as wire
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import auth_metadata
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2

TRIES = 4
"""How often a request is sent, each time to whoever serves the model then."""
PAUSE_S = 0.5
BUSY_S = 60.0
"""How long a server that holds one version at a time may be busy with another one's requests."""
_MOVED = (
    Reason.CONNECTION_LOST,
    Reason.DRAINING,
    Reason.ENGINE_CRASHED,
    Reason.SERVER_STARTING,
    Reason.STALE_ATTEMPT,
)
"""After these the model may be found elsewhere, or there again."""

Resolved = catalog_service_pb2.ResolveModelResponse


class Finder(Protocol):
    """Finds servers; `SchedulerModels` does."""

    channels: Channels
    clock: Clock
    load: dict[str, int]

    async def resolve(self, name: str, caller: Caller) -> Resolved: ...

    async def served(self, name: str, caller: Caller, resolved: Resolved) -> Served: ...

    def lost(self, resolved: Resolved, caller: Caller) -> None: ...

    def choose(self, endpoints: Sequence[job_pb2.Endpoint], conversation: str) -> job_pb2.Endpoint: ...


class ServedModel:
    """A model that was found."""

    def __init__(
        self,
        finder: Finder,
        caller: Caller,
        resolved: Resolved,
        served: Served,
        fields: Iterable[str],
        prompts: ChatPrompts,
    ) -> None:
        self._finder = finder
        self._caller = caller
        self._resolved = resolved
        self._served = served
        self.weights = resolved.model
        self.fields: Collection[str] = frozenset(fields)
        self.prompts = prompts

    async def sample(
        self,
        prompt_ids: Sequence[int],
        options: SamplingOptions,
        *,
        n: int,
        request_id: str,
        conversation: str,
        keep: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Sample. `keep`: the same request id may be sent again by our caller, so that what it gave must stay
        with the server.
        """
        request = pb.SampleRequest(
            request_id=request_id,
            model=self._resolved.model_ref,
            prompt=wire.prompt_pb(prompt_ids),
            params=wire.params_pb(options),
            n=n,
            conversation=conversation,
        )
        resumed = Resumed()
        served, begun, tries = self._served, False, 0
        deadline = self._finder.clock.monotonic() + BUSY_S
        while True:
            try:
                async with contextlib.aclosing(self._try(request, served, resumed, keep=keep)) as events:
                    async for event in events:
                        if not (begun and isinstance(event, Started)):
                            yield event
                        begun = begun or isinstance(event, Started)
                return
            except ServiceError as error:
                busy = error.reason is Reason.MERGED_ONE_VERSION
                tries += not busy
                over = self._finder.clock.monotonic() > deadline if busy else tries == TRIES
                if over or isinstance(error, Diverged) or not (busy or error.reason in _MOVED):
                    raise
                self._finder.lost(self._resolved, self._caller)
                await self._finder.clock.sleep(PAUSE_S * max(1, tries))
                served = await self._again()

    async def _again(self) -> Served:
        """Who serves the same weights by now, whatever became of the name."""
        name = self._resolved.deployment or self._resolved.model
        resolved = await self._finder.resolve(name, self._caller)
        if resolved.model != self.weights:
            name = self.weights
            resolved = await self._finder.resolve(name, self._caller)
        return await self._finder.served(name, self._caller, resolved)

    async def _try(
        self, request: pb.SampleRequest, served: Served, resumed: Resumed, *, keep: bool
    ) -> AsyncGenerator[Event, None]:
        endpoint = self._finder.choose(served.endpoints, request.conversation)
        request.attempt, request.job_token = endpoint.attempt, served.job_token
        stub = InferenceServiceStub(await self._finder.channels.to(endpoint.address))
        metadata = auth_metadata(self._caller.key, served.job_token)
        call = stub.StreamSample(pb.StreamSampleRequest(sample=request), metadata=metadata)
        resumed.begin()
        left = True
        try:
            with self._counted(endpoint.address), typed_failures():
                async for response in call:
                    event = _event(response, resumed)
                    if event is not None:
                        yield event
            if resumed.finished < request.n:
                raise ServiceError(Reason.CONNECTION_LOST, "the server ended a reply before its end")
            left = False
            if not keep:
                metadata = auth_metadata(self._caller.key, served.job_token)
                _background(_acknowledge(stub, request.request_id, metadata))
        except ServiceError:
            left = False
            raise
        finally:
            call.cancel()
            if left:
                # Nobody listens any more: the slot is freed now, not when the reply is long enough.
                metadata = auth_metadata(self._caller.key, served.job_token)
                _background(_cancel(stub, request.request_id, metadata))

    @contextlib.contextmanager
    def _counted(self, address: str) -> Any:
        load = self._finder.load
        load[address] = load.get(address, 0) + 1
        try:
            yield
        finally:
            load[address] -= 1
            if not load[address]:
                del load[address]


def _event(response: pb.StreamSampleResponse, resumed: Resumed) -> Event | None:
    kind = response.WhichOneof("event")
    if kind == "started":
        return wire.started(response.started)
    if kind == "delta":
        return resumed.delta(wire.delta(response.delta))
    if kind == "completion":
        return resumed.completion(wire.finished(response.completion))
    if kind == "prompt_logprobs":
        return wire.prompt_scores(response.prompt_logprobs)
    return Waiting()


async def _acknowledge(
    stub: InferenceServiceStub, request_id: str, metadata: Sequence[tuple[str, str]]
) -> None:
    request = pb.AckCompletionsRequest(request_ids=[request_id])
    with contextlib.suppress(grpc.RpcError):
        await stub.AckCompletions(request, metadata=metadata, timeout=5.0)


async def _cancel(stub: InferenceServiceStub, request_id: str, metadata: Sequence[tuple[str, str]]) -> None:
    request = pb.CancelSampleRequest(request_id=request_id)
    with contextlib.suppress(grpc.RpcError):
        await stub.CancelSample(request, metadata=metadata, timeout=5.0)


_tasks: set[asyncio.Task[None]] = set()
"""Held so that they are not collected before they end."""


def _background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
