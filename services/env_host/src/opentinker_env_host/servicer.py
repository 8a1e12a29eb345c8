"""EnvHostService: one short method per RPC, wire to domain and back."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from opentinker_env_host import wire
from opentinker_env_host.domain.host import EnvironmentHost
from opentinker_env_host.drive import Drive
from opentinker_env_host.pages import page_of
from opentinker_env_host.ports import Sandbox
from opentinker_kit.auth import acting_job, acting_project
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.required import checks_its_messages
from opentinkerapi.env.v1 import capabilities_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceServicer
from opentinkerapi.runtime.reasons import Reason

T = TypeVar("T")


class EnvHostServicer(EnvHostServiceServicer):
    """Serves the host's episodes."""

    def __init__(self, host: EnvironmentHost, clock: Clock, sandbox: Sandbox) -> None:
        self._host = host
        self._clock = clock
        self._sandbox = sandbox
        self._streams: set[Drive] = set()

    def end_streams(self) -> None:
        """Let open streams answer what they were asked and take no more."""
        for stream in self._streams:
            stream.end()

    async def GetCapabilities(
        self, request: capabilities_pb2.GetCapabilitiesRequest, context: Any
    ) -> capabilities_pb2.GetCapabilitiesResponse:
        self._host.check_started()
        return wire.capabilities_to_proto(await self._sandbox.facts())

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Any
    ) -> pb.ListEnvironmentsResponse:
        names = sorted(self._host.playable)
        page = page_of(request.page_size, request.page_token, scope="environments")
        shown = names[page.start : page.stop]
        return pb.ListEnvironmentsResponse(
            environments=[wire.environment_to_proto(name, self._host.facts(name)) for name in shown],
            next_page_token=page.next_token(len(names)),
        )

    async def GetEnvironment(
        self, request: pb.GetEnvironmentRequest, context: Any
    ) -> pb.GetEnvironmentResponse:
        name = wire.environment_id(request.name, "name")
        if name not in self._host.playable:
            raise ServiceError(Reason.ENVIRONMENT_NOT_FOUND, f"no environment {name!r} here")
        return pb.GetEnvironmentResponse(environment=wire.environment_to_proto(name, self._host.facts(name)))

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksResponse:
        name = wire.environment_id(request.environment, "environment")
        options = wire.json_object(request.options_json, "options_json")
        page = page_of(request.page_size, request.page_token, scope=f"{name}/{request.split}")
        tasks, total = await self._host.list_tasks(name, request.split, options, page.start, page.size)
        return pb.ListTasksResponse(
            tasks_json=[json.dumps(task) for task in tasks],
            next_page_token=page.next_token(total),
            total_size=total,
        )

    async def OpenGroup(self, request: pb.OpenGroupRequest, context: Any) -> pb.OpenGroupResponse:
        recipe = wire.recipe_from_proto(request)
        group = await self._host.open_group(
            request.request_id, recipe, request.size, acting_job(), acting_project()
        )
        self._host.commit()
        response = pb.OpenGroupResponse(group=group.name, episodes=group.episodes)
        response.expire_time.FromDatetime(self._clock.now() + timedelta(seconds=recipe.lease_ttl_s))
        return response

    async def Begin(self, request: pb.BeginRequest, context: Any) -> pb.BeginResponse:
        return wire.begin_to_proto(await self._whole(self._host.begin(request.episode, acting_job())))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        action = wire.actions_from_proto(request.actions)
        key = wire.action_key(request.actions)
        step = self._host.step(request.episode, request.seq, key, action, acting_job())
        return wire.step_to_proto(await self._whole(step))

    async def Finalize(self, request: pb.FinalizeRequest, context: Any) -> pb.FinalizeResponse:
        return wire.result_to_proto(await self._whole(self._host.finalize(request.episode, acting_job())))

    @checks_its_messages
    async def Drive(
        self, requests: AsyncIterator[pb.DriveRequest], context: Any
    ) -> AsyncIterator[pb.DriveResponse]:
        stream = Drive(self._host)
        self._streams.add(stream)
        try:
            async for response in stream.responses(requests):
                yield response
        finally:
            self._streams.discard(stream)

    async def CloseEpisodes(self, request: pb.CloseEpisodesRequest, context: Any) -> pb.CloseEpisodesResponse:
        await self._host.close(request.episodes, acting_job())
        self._host.commit()
        return pb.CloseEpisodesResponse()

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        lost, lasts_s = self._host.renew(request.episodes, acting_job())
        response = pb.RenewLeaseResponse(lost_episodes=lost)
        response.expire_time.FromDatetime(self._clock.now() + timedelta(seconds=lasts_s))
        return response

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        answer = await asyncio.shield(self._host.keep(work))
        self._host.commit()
        return answer
