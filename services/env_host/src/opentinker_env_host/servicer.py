"""EnvHostService: one short method per RPC, wire to domain and back."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from opentinker_env_host import package_wire, wire
from opentinker_env_host.domain.host import EnvironmentHost
from opentinker_env_host.domain.registry import Registry
from opentinker_env_host.drive import Drive
from opentinker_env_host.pages import page_of
from opentinker_env_host.ports import EnvironmentFacts, Sandbox
from opentinker_kit.auth import acting_job, acting_project, current_principal
from opentinker_kit.clock import Clock
from opentinker_kit.required import checks_its_messages
from opentinkerapi.env.v1 import capabilities_pb2, package_pb2, snapshot_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceServicer

T = TypeVar("T")


class EnvHostServicer(EnvHostServiceServicer):
    """Serves the host's episodes."""

    def __init__(self, host: EnvironmentHost, registry: Registry, clock: Clock, sandbox: Sandbox) -> None:
        self._host = host
        self._registry = registry
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
        found = self._environments()
        names = sorted(found)
        page = page_of(request.page_size, request.page_token, scope="environments")
        shown = names[page.start : page.stop]
        return pb.ListEnvironmentsResponse(
            environments=[wire.environment_to_proto(name, found[name]) for name in shown],
            next_page_token=page.next_token(len(names)),
        )

    async def GetEnvironment(
        self, request: pb.GetEnvironmentRequest, context: Any
    ) -> pb.GetEnvironmentResponse:
        name = wire.environment_id(request.name, "name")
        facts = self._environments().get(name)
        if facts is None:
            package = self._registry.get(_project(), name)
            facts, name = self._host.facts(self._registry.resolve(_project(), name, "name")), package.version
        return pb.GetEnvironmentResponse(environment=wire.environment_to_proto(name, facts))

    async def UploadPackage(
        self, request: package_pb2.UploadPackageRequest, context: Any
    ) -> package_pb2.UploadPackageResponse:
        spec = package_wire.spec_from_proto(request.spec)
        upload = self._registry.upload(
            _project(), request.request_id, request.environment_id, spec, request.archive
        )
        version = package_wire.version_to_proto(await self._whole(upload))
        return package_pb2.UploadPackageResponse(version=version)

    async def ListEnvironmentVersions(
        self, request: package_pb2.ListEnvironmentVersionsRequest, context: Any
    ) -> package_pb2.ListEnvironmentVersionsResponse:
        self._host.check_started()
        name = wire.environment_id(request.environment, "environment") if request.environment else ""
        found = self._registry.versions(_project(), name)
        page = page_of(request.page_size, request.page_token, scope=f"versions/{_project()}/{name}")
        return package_pb2.ListEnvironmentVersionsResponse(
            versions=[package_wire.version_to_proto(each) for each in found[page.start : page.stop]],
            next_page_token=page.next_token(len(found)),
        )

    async def GetEnvironmentVersion(
        self, request: package_pb2.GetEnvironmentVersionRequest, context: Any
    ) -> package_pb2.GetEnvironmentVersionResponse:
        self._host.check_started()
        package = self._registry.get(_project(), wire.environment_id(request.name, "name"))
        return package_pb2.GetEnvironmentVersionResponse(version=package_wire.version_to_proto(package))

    async def DeleteEnvironmentVersion(
        self, request: package_pb2.DeleteEnvironmentVersionRequest, context: Any
    ) -> package_pb2.DeleteEnvironmentVersionResponse:
        self._host.check_started()
        await self._whole(self._registry.delete(_project(), wire.environment_id(request.name, "name")))
        return package_pb2.DeleteEnvironmentVersionResponse()

    async def GetEnvironmentLog(
        self, request: package_pb2.GetEnvironmentLogRequest, context: Any
    ) -> package_pb2.GetEnvironmentLogResponse:
        self._host.check_started()
        name = wire.environment_id(request.name, "name")
        size = package_wire.tail_bytes(request.tail_bytes)
        return package_wire.logs_to_proto(*await self._registry.logs(_project(), name, size))

    async def ProbeEnvironment(
        self, request: package_pb2.ProbeEnvironmentRequest, context: Any
    ) -> package_pb2.ProbeEnvironmentResponse:
        name = wire.environment_id(request.environment, "environment")
        report = await self._registry.probe(_project(), name, package_wire.probe_from_proto(request))
        return package_pb2.ProbeEnvironmentResponse(report=package_wire.report_to_proto(report))

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksResponse:
        name = wire.environment_id(request.environment, "environment")
        options = wire.json_object(request.options_json, "options_json")
        key = self._registry.resolve(_project(), name)
        page = page_of(request.page_size, request.page_token, scope=f"{name}/{request.split}")
        tasks, total = await self._host.list_tasks(key, request.split, options, page.start, page.size)
        return pb.ListTasksResponse(
            tasks_json=[json.dumps(task) for task in tasks],
            next_page_token=page.next_token(total),
            total_size=total,
        )

    async def OpenGroup(self, request: pb.OpenGroupRequest, context: Any) -> pb.OpenGroupResponse:
        recipe = wire.recipe_from_proto(request)
        asked = recipe.environment
        recipe = replace(recipe, environment=self._registry.resolve(_project(), asked))
        group = await self._host.open_group(
            request.request_id, recipe, request.size, acting_job(), acting_project(), asked=asked
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
        finalize = self._host.finalize(request.episode, request.last_seq, acting_job())
        return wire.result_to_proto(await self._whole(finalize))

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

    async def Snapshot(
        self, request: snapshot_pb2.SnapshotRequest, context: Any
    ) -> snapshot_pb2.SnapshotResponse:
        work = self._host.forks.snapshot(request.request_id, request.episode, acting_job())
        taken = await self._whole(work)
        kind = wire.SNAPSHOT_KINDS[taken.kind]
        return snapshot_pb2.SnapshotResponse(snapshot=taken.name, kind=kind, seq=taken.seq)

    async def Fork(self, request: snapshot_pb2.ForkRequest, context: Any) -> snapshot_pb2.ForkResponse:
        forked = await self._whole(
            self._host.forks.fork(
                request.request_id, request.snapshot, request.size, acting_job(), acting_project()
            )
        )
        response = snapshot_pb2.ForkResponse(
            group=forked.group,
            episodes=forked.episodes,
            kind=wire.SNAPSHOT_KINDS[forked.kind],
            next_seq=forked.next_seq,
        )
        response.expire_time.FromDatetime(self._clock.now() + timedelta(seconds=forked.lease_ttl_s))
        return response

    async def Restore(
        self, request: snapshot_pb2.RestoreRequest, context: Any
    ) -> snapshot_pb2.RestoreResponse:
        kind, next_seq = await self._whole(
            self._host.forks.restore(request.request_id, request.episode, request.snapshot, acting_job())
        )
        return snapshot_pb2.RestoreResponse(kind=wire.SNAPSHOT_KINDS[kind], next_seq=next_seq)

    async def CloseEpisodes(self, request: pb.CloseEpisodesRequest, context: Any) -> pb.CloseEpisodesResponse:
        await self._host.close(request.episodes, acting_job())
        self._host.commit()
        return pb.CloseEpisodesResponse()

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        lost, lasts_s = self._host.renew(request.episodes, acting_job())
        response = pb.RenewLeaseResponse(lost_episodes=lost)
        response.expire_time.FromDatetime(self._clock.now() + timedelta(seconds=lasts_s))
        return response

    def _environments(self) -> dict[str, EnvironmentFacts]:
        """What the caller's project can play, by name."""
        found = {name: self._host.facts(name) for name in self._host.playable}
        for package in self._registry.ready(_project()):
            if package.facts is not None:
                found[package.version] = package.facts
        return found

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        answer = await asyncio.shield(self._host.keep(work))
        self._host.commit()
        return answer


def _project() -> str:
    """Whose uploads a call is about: the project of the job or key that it came with."""
    return current_principal().project
