"""Environments that a project uploads to an env_host, and probes of those that are there."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from opentinker.environments.packing import Packed
from opentinker.environments.probe import Check, ProbeReport, Timing
from opentinkerapi.env.v1 import package_pb2 as pb
from opentinkerapi.env.v1 import probe_pb2
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceStub
from opentinkerapi.runtime.errors import from_rpc_error

T = TypeVar("T")

PREFIX = "environments/"
STATES = {
    pb.PACKAGE_STATE_BUILDING: "building",
    pb.PACKAGE_STATE_READY: "ready",
    pb.PACKAGE_STATE_FAILED: "failed",
}
_LOOK_EVERY_S = 0.3
_DEADLINE_S = 60.0
_PROBE_DEADLINE_S = 600.0


class Uploads:
    """The uploads of the project that a channel's key is of."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = EnvHostServiceStub(channel)

    async def push(self, packed: Packed, *, exclusive: bool = False) -> pb.EnvironmentVersion:
        """Upload; the version, which is not built yet."""
        request = pb.UploadPackageRequest(
            request_id=uuid.uuid4().hex,
            environment_id=packed.name,
            spec=pb.PackageSpec(
                target=packed.target,
                requirements=packed.requirements,
                requires_python=packed.requires_python,
                wheel=packed.wheel,
                exclusive=exclusive,
            ),
            archive=packed.archive,
        )
        return (await _call(self._stub.UploadPackage, request)).version

    async def building(self, name: str) -> AsyncIterator[tuple[pb.EnvironmentVersion, str]]:
        """A version and what its build wrote since, again and again until it is built."""
        shown = 0
        while True:
            version = await self.get(name)
            text = (await self.logs(name, 256 << 10)).build_log
            yield version, text[shown:]
            shown = len(text)
            if version.state != pb.PACKAGE_STATE_BUILDING:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def versions(self, name: str = "") -> list[pb.EnvironmentVersion]:
        """What the project uploaded."""
        request = pb.ListEnvironmentVersionsRequest(environment=_named(name) if name else "", page_size=1000)
        found: list[pb.EnvironmentVersion] = []
        while True:
            answer = await _call(self._stub.ListEnvironmentVersions, request)
            found += answer.versions
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def get(self, name: str) -> pb.EnvironmentVersion:
        """One version, or the newest of a name."""
        request = pb.GetEnvironmentVersionRequest(name=_named(name))
        return (await _call(self._stub.GetEnvironmentVersion, request)).version

    async def delete(self, name: str) -> None:
        """Remove a version."""
        await _call(
            self._stub.DeleteEnvironmentVersion, pb.DeleteEnvironmentVersionRequest(name=_named(name))
        )

    async def logs(self, name: str, tail_bytes: int = 0) -> pb.GetEnvironmentLogResponse:
        """What its build and its workers wrote."""
        request = pb.GetEnvironmentLogRequest(name=_named(name), tail_bytes=tail_bytes)
        answer: pb.GetEnvironmentLogResponse = await _call(self._stub.GetEnvironmentLog, request)
        return answer

    async def probe(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        seeds: int = 0,
        steps: int = 0,
        actions: Sequence[str] = (),
    ) -> ProbeReport:
        """Measure an environment where it is hosted."""
        request = pb.ProbeEnvironmentRequest(
            environment=_named(name),
            options_json=json.dumps(dict(options)) if options else "",
            seeds=seeds,
            steps=steps,
            actions=actions,
        )
        answer = await _call(self._stub.ProbeEnvironment, request, _PROBE_DEADLINE_S)
        return _report(name, answer.report)


def _report(name: str, report: probe_pb2.ProbeReport) -> ProbeReport:
    checks = tuple(
        Check(
            check.name,
            probe_pb2.ProbeVerdict.Name(check.verdict).removeprefix("PROBE_VERDICT_"),
            check.detail,
        )
        for check in report.checks
    )
    timings = tuple(
        Timing(
            each.call,
            each.count,
            each.median.ToTimedelta().total_seconds(),
            each.longest.ToTimedelta().total_seconds(),
        )
        for each in report.timings
    )
    return ProbeReport(
        name.removeprefix(PREFIX),
        report.deterministic,
        checks,
        tuple(report.warnings),
        timings,
        report.episodes,
        report.steps,
    )


def _named(name: str) -> str:
    return name if name.startswith(PREFIX) else f"{PREFIX}{name}"


async def _call(method: Callable[..., Awaitable[T]], request: Any, deadline_s: float = _DEADLINE_S) -> T:
    try:
        return await method(request, timeout=deadline_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
