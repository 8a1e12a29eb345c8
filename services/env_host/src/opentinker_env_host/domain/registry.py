"""Environments that projects upload: their versions, builds and pools of workers.

Invariant: what belongs to a project is found by that project alone, and its workers run nothing else: each
version has a pool of its own, whose workers run in jails. Builds run one at a time, after the upload was
answered; a version that is built can be played until it is deleted.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from opentinker_env_host.domain.answers import FirstAnswers
from opentinker_env_host.domain.host import EnvironmentHost
from opentinker_env_host.domain.packages import (
    Package,
    PackageSpec,
    PackageState,
    check_spec,
    key_of,
    parse_name,
)
from opentinker_env_host.domain.player import Background
from opentinker_env_host.domain.pool import WorkerPool
from opentinker_env_host.ports import (
    BuildFailed,
    Packages,
    Plain,
    Prober,
    WorkerLauncher,
    WorkerUnusable,
    Workshop,
)
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

MAX_FACTS_BYTES = 256 << 10
FIRST_LOOK: Mapping[str, Any] = {"seeds": 4, "steps": 4}
"""How a version is probed when it was built."""

MakePool = Callable[[Package, WorkerLauncher], WorkerPool]


@dataclass(frozen=True, slots=True)
class PackageQuotas:
    """What the host takes."""

    enabled: bool
    archive_bytes: int
    project_versions: int
    project_bytes: int
    idle_s: float


class Registry:
    """See the module's text. All methods raise ServiceError."""

    def __init__(
        self,
        host: EnvironmentHost,
        store: Packages,
        workshop: Workshop,
        prober: Prober,
        make_pool: MakePool,
        quotas: PackageQuotas,
        clock: Clock,
    ) -> None:
        self._host = host
        self._store = store
        self._workshop = workshop
        self._prober = prober
        self._make_pool = make_pool
        self._quotas = quotas
        self._clock = clock
        self._packages: dict[str, Package] = {}
        self._answers: FirstAnswers[Package] = FirstAnswers(clock)
        self._background = Background()
        self._building = asyncio.Lock()
        self._keeping = asyncio.Lock()
        self._probing = asyncio.Semaphore(1)
        self._used: dict[str, float] = {}

    async def load(self) -> None:
        """What a host before this one had; what is not built any more is built again. Before the host
        starts, so that it finds the pools of its episodes.
        """
        for package in await asyncio.to_thread(self._store.load):
            self._packages[package.key] = package
        if not self._packages or not self._quotas.enabled:
            return
        try:
            await self._workshop.python()
        except ServiceError as error:
            log.error("uploaded environments cannot be played", error=error.message)
            return
        for package in self._packages.values():
            if package.state is PackageState.READY and self._workshop.is_built(package):
                self._open_pool(package)
            elif package.state is not PackageState.FAILED:
                package.state = PackageState.BUILDING
                self._background.start(self._build(package))

    async def stop(self) -> None:
        """End builds; they begin anew where the host is started again."""
        await self._background.end()

    async def upload(
        self, project: str, request_id: str, name: str, spec: PackageSpec, archive: bytes
    ) -> Package:
        """A new version of an environment, or the one that has this content already."""
        self._host.check_started()
        if self._host.draining:
            raise ServiceError(Reason.DRAINING, "this host is shutting down; upload elsewhere, or later")
        if not self._quotas.enabled:
            raise ServiceError(Reason.MISSING_DEPENDENCY, "this host takes no uploads (packages.enabled)")
        name, number = parse_name(name, "environment_id")
        if number is not None:
            text = "the host numbers versions; give the name alone"
            raise ServiceError(Reason.INVALID_FIELD, text, field="environment_id")
        if self._host.is_hosted(name):
            text = f"{name!r} is an environment of this host; take another name"
            raise ServiceError(Reason.INVALID_FIELD, text, field="environment_id")
        if len(archive) > self._quotas.archive_bytes:
            text = f"it has {len(archive)} bytes; at most {self._quotas.archive_bytes} are taken"
            raise ServiceError(Reason.INVALID_FIELD, text, field="archive")
        check_spec(spec, await self._workshop.python())
        await self._workshop.check(archive)
        sha256 = hashlib.sha256(archive).hexdigest()
        body = json.dumps([name, spec.as_json(), sha256], sort_keys=True)
        return await self._answers.get(
            request_id,
            body,
            lambda: self._add(project, request_id, name, spec, archive, sha256),
            scope=project,
        )

    async def _add(
        self, project: str, request_id: str, name: str, spec: PackageSpec, archive: bytes, sha256: str
    ) -> Package:
        async with self._keeping:
            own = [package for package in self._packages.values() if package.project == project]
            for package in own:
                same = (package.name, package.spec, package.sha256) == (name, spec, sha256)
                if same:
                    if package.state is PackageState.FAILED:
                        # What it needs may be there by now.
                        package.state, package.error = PackageState.BUILDING, ""
                        self._background.start(self._build(package))
                    return package
                if package.request_id == request_id:
                    text = f"request_id {request_id!r} was used for {package.version}"
                    raise ServiceError(Reason.REQUEST_ID_REUSED, text, field="request_id")
            self._check_room(project, own, len(archive))
            package = Package(
                project, name, 0, spec, sha256, len(archive), self._clock.now(), request_id=request_id
            )
            await asyncio.to_thread(self._store.add, package, archive)
            self._packages[package.key] = package
        log.info("package uploaded", package=package.key, sha256=sha256, bytes=len(archive))
        self._background.start(self._build(package))
        return package

    def versions(self, project: str, name: str = "") -> list[Package]:
        """What a project uploaded, by name, the newest version of each first."""
        found = [
            package
            for package in self._packages.values()
            if package.project == project and name in ("", package.name)
        ]
        return sorted(found, key=lambda package: (package.name, -package.number))

    def get(self, project: str, version: str, field: str = "name") -> Package:
        """A version of the project, `NAME@N` or the newest of `NAME`."""
        name, number = parse_name(version, field)
        found = self.versions(project, name)
        for package in found:
            if number in (None, package.number):
                return package
        raise ServiceError(Reason.ENVIRONMENT_NOT_FOUND, f"the project has no environment {version!r}")

    def ready(self, project: str) -> list[Package]:
        """What can be played."""
        return [package for package in self.versions(project) if package.state is PackageState.READY]

    async def delete(self, project: str, version: str) -> None:
        """Remove a version; one that does not exist is passed over."""
        name, number = parse_name(version, "name")
        if number is None:
            text = f"name a version to delete, as {name}@1"
            raise ServiceError(Reason.INVALID_FIELD, text, field="name")
        async with self._keeping:
            package = self._packages.get(key_of(project, f"{name}@{number}"))
            if package is None:
                return
            if count := self._host.open_by_environment()[package.key]:
                text = f"{count} episodes of {package.version} are open; close them first"
                raise ServiceError(Reason.INVALID_STATE, text)
            del self._packages[package.key]
            package.deleted = True
            await self._host.close_pool(package.key)
            await asyncio.to_thread(self._store.remove, package)
            await asyncio.to_thread(self._workshop.remove, package, list(self._packages.values()))

    async def logs(self, project: str, version: str, tail_bytes: int) -> tuple[str, list[tuple[str, str]]]:
        """The ends of what a version's build and its workers wrote."""
        package = self.get(project, version)
        return await asyncio.to_thread(self._workshop.logs, package, tail_bytes)

    def resolve(self, project: str, environment: str, field: str = "environment") -> str:
        """What the host knows an environment by that a project names: one of the settings, or its own."""
        if self._host.is_hosted(environment):
            return environment
        return self._playable(project, environment, field).key

    def _playable(self, project: str, environment: str, field: str) -> Package:
        name, number = parse_name(environment, field)
        found = self.versions(project, name)
        if number is None:
            # The newest that can be played; while the first is built, or failed, that is said.
            found = [each for each in found if each.state is PackageState.READY] or found
        package = next((each for each in found if number in (None, each.number)), None)
        if package is None:
            known = ", ".join([*sorted(self._host.playable), *(each.version for each in self.ready(project))])
            text = f"no environment {environment!r} here; known: {known or 'none'}"
            raise ServiceError(Reason.UNKNOWN_ENVIRONMENT, text, field=field)
        metadata = {"environment": package.version}
        if package.state is PackageState.BUILDING:
            text = f"{package.version} is being built; come back"
            raise ServiceError(Reason.SERVER_STARTING, text, metadata=metadata, retry_after_s=1.0)
        if package.state is PackageState.FAILED:
            text = f"{package.version} cannot be played: {package.error}"
            raise ServiceError(Reason.MISSING_DEPENDENCY, text, metadata=metadata)
        self._used[package.key] = self._clock.monotonic()
        return package

    async def probe(self, project: str, environment: str, request: Plain) -> Plain:
        """Measure an environment."""
        self._host.check_started()
        what: str | Package
        if self._host.is_hosted(environment):
            self._host.facts(environment)
            what = environment
        else:
            what = self._playable(project, environment, "environment")
        if self._probing.locked():
            raise ServiceError(Reason.OVERLOADED, "another probe runs; come back", retry_after_s=2.0)
        async with self._probing:
            return await self._prober.probe(what, request)

    def rest(self) -> None:
        """Now and then: end the workers of versions that nobody plays."""
        now = self._clock.monotonic()
        playing = self._host.open_by_environment()
        for key in list(self._used):
            if playing[key]:
                self._used[key] = now
            elif now - self._used[key] > self._quotas.idle_s:
                del self._used[key]
                self._host.rest_pool(key)

    def _check_room(self, project: str, own: Sequence[Package], size: int) -> None:
        quotas = self._quotas
        text = ""
        if len(own) >= quotas.project_versions:
            text = (
                f"the project has {len(own)} versions of environments, and may have {quotas.project_versions}"
            )
        elif (held := sum(package.size for package in own)) + size > quotas.project_bytes:
            text = f"the project's uploads have {held} bytes, and may have {quotas.project_bytes}"
        if text:
            text += "; delete some"
            raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[(f"projects/{project}", text)])

    async def _build(self, package: Package) -> None:
        async with self._building:
            if package.deleted or package.state is not PackageState.BUILDING:
                return
            try:
                archive = await asyncio.to_thread(self._store.archive, package)
                await self._workshop.build(package, archive)
                await self._try(package)
                package.state = PackageState.READY
            except (BuildFailed, WorkerUnusable) as error:
                package.state, package.error = PackageState.FAILED, f"{package.version}: {error}"
            except ServiceError as error:
                package.state, package.error = PackageState.FAILED, f"{package.version}: {error.message}"
            except Exception:
                log.exception("a build failed unexpectedly", package=package.key)
                package.state = PackageState.FAILED
                package.error = f"{package.version}: a fault in the server; see its log"
            log.info("package built", package=package.key, state=package.state, error=package.error)
            if not package.deleted:
                await asyncio.to_thread(self._store.keep_result, package)

    async def _try(self, package: Package) -> None:
        """Import it in a worker, and look whether it heeds its seed. WorkerUnusable."""
        pool = self._open_pool(package)
        await pool.start()
        if pool.facts is None:
            await self._host.close_pool(package.key)
            raise WorkerUnusable(pool.unusable)
        if len(json.dumps(asdict(pool.facts))) > MAX_FACTS_BYTES:
            await self._host.close_pool(package.key)
            raise WorkerUnusable("it says too much of itself; shorten its description and tools")
        package.facts = pool.facts
        self._used[package.key] = self._clock.monotonic()
        try:
            async with self._probing:
                report = await self._prober.probe(package, FIRST_LOOK)
            package.warnings = tuple(report["warnings"])
        except ServiceError as error:
            package.warnings = (f"it could not be probed: {error.message}",)
        for warning in package.warnings:
            log.warning("ENVIRONMENT BREAKS ITS PROMISES", package=package.key, warning=warning)

    def _open_pool(self, package: Package) -> WorkerPool:
        pool = self._make_pool(package, self._workshop.launcher(package))
        pool.facts = package.facts
        self._host.open_pool(package.key, pool)
        return pool
