"""Protobuf to and from what the host knows of uploaded packages and probes."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from opentinker_env_host.domain.packages import Package, PackageSpec, PackageState
from opentinker_env_host.ports import Plain
from opentinker_env_host.wire import ENVIRONMENTS, json_object
from opentinker_kit.errors import ServiceError
from opentinkerapi.env.v1 import package_pb2, probe_pb2
from opentinkerapi.runtime.reasons import Reason

DEFAULT_TAIL, MAX_TAIL = 64 << 10, 256 << 10
MAX_SEEDS, MAX_STEPS, MAX_ACTIONS = 64, 1000, 1000

_STATES: Mapping[PackageState, "package_pb2.PackageState.ValueType"] = {
    PackageState.BUILDING: package_pb2.PACKAGE_STATE_BUILDING,
    PackageState.READY: package_pb2.PACKAGE_STATE_READY,
    PackageState.FAILED: package_pb2.PACKAGE_STATE_FAILED,
}
_VERDICTS: Mapping[str, "probe_pb2.ProbeVerdict.ValueType"] = {
    "PASSED": probe_pb2.PROBE_VERDICT_PASSED,
    "FAILED": probe_pb2.PROBE_VERDICT_FAILED,
    "SKIPPED": probe_pb2.PROBE_VERDICT_SKIPPED,
}


def spec_from_proto(spec: package_pb2.PackageSpec) -> PackageSpec:
    """What is uploaded."""
    return PackageSpec(
        spec.target,
        tuple(requirement.strip() for requirement in spec.requirements),
        spec.requires_python.strip(),
        spec.wheel,
        spec.exclusive,
    )


def version_to_proto(package: Package) -> package_pb2.EnvironmentVersion:
    """A version."""
    spec = package.spec
    version = package_pb2.EnvironmentVersion(
        name=f"{ENVIRONMENTS}{package.version}",
        spec=package_pb2.PackageSpec(
            target=spec.target,
            requirements=spec.requirements,
            requires_python=spec.requires_python,
            wheel=spec.wheel,
            exclusive=spec.exclusive,
        ),
        sha256=package.sha256,
        size_bytes=package.size,
        state=_STATES[package.state],
        build_error=package.error,
        warnings=package.warnings,
    )
    version.create_time.FromDatetime(package.create_time)
    return version


def tail_bytes(asked: int) -> int:
    """How much of each log is shown. ServiceError INVALID_FIELD."""
    return _within("tail_bytes", asked, DEFAULT_TAIL, MAX_TAIL)


def logs_to_proto(build: str, workers: list[tuple[str, str]]) -> package_pb2.GetEnvironmentLogResponse:
    """The ends of logs."""
    logs = [package_pb2.WorkerLog(worker=worker, text=text) for worker, text in workers]
    return package_pb2.GetEnvironmentLogResponse(build_log=build, worker_logs=logs)


def probe_from_proto(request: package_pb2.ProbeEnvironmentRequest) -> dict[str, Any]:
    """What a probe is asked for. ServiceError INVALID_FIELD."""
    if len(request.actions) > MAX_ACTIONS or sum(map(len, request.actions)) > 1 << 16:
        raise ServiceError(Reason.INVALID_FIELD, "at most 1000 actions of 64 KiB in all", field="actions")
    return {
        "options": json_object(request.options_json, "options_json"),
        "seeds": _within("seeds", request.seeds, 4, MAX_SEEDS),
        "steps": _within("steps", request.steps, 8, MAX_STEPS),
        "actions": list(request.actions),
    }


def report_to_proto(report: Plain) -> probe_pb2.ProbeReport:
    """What a probe found."""
    return probe_pb2.ProbeReport(
        checks=[
            probe_pb2.ProbeCheck(
                name=each["name"],
                verdict=_VERDICTS.get(each["verdict"], probe_pb2.PROBE_VERDICT_UNSPECIFIED),
                detail=each["detail"],
            )
            for each in report["checks"]
        ],
        warnings=report["warnings"],
        timings=[
            probe_pb2.ProbeTiming(
                call=each["call"],
                count=each["count"],
                median=_duration(each["median_s"]),
                longest=_duration(each["longest_s"]),
            )
            for each in report["timings"]
        ],
        episodes=report["episodes"],
        steps=report["steps"],
        deterministic=report["deterministic"],
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _within(field: str, asked: int, default: int, most: int) -> int:
    if not 0 <= asked <= most:
        raise ServiceError(Reason.INVALID_FIELD, f"must be from 1 to {most}, not {asked}", field=field)
    return asked or default
