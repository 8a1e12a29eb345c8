"""A real scheduler over real gRPC and a real database, with small real server processes.

The modules in ON_BOTH run on SQLite and on PostgreSQL, the others on SQLite.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from opentinker_kit.files import make_key_file
from opentinker_kit.settings import read_secret
from opentinker_kit.testing import PostgresServer, wait_until
from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.adapters.sql.engines import Location, Postgres
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.settings import SchedulerSettings
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from opentinkerapi.scheduler.v1.server_registry_service_pb2_grpc import ServerRegistryServiceStub

TESTS = Path(__file__).parent
MODEL = "some-model"
ON_BOTH = (
    "test_accounts",
    "test_catalog_service",
    "test_deployments",
    "test_retention",
    "test_run_service",
    "test_scheduler_service",
    "test_sql",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if "records" in metafunc.fixturenames and module in ON_BOTH:
        metafunc.parametrize("records", ["sqlite", "postgres"], indirect=True)


@dataclass
class Rig:
    """A running scheduler and ways to talk to it."""

    scheduler: Scheduler
    folder: Path
    channels: list[grpc.aio.Channel] = field(default_factory=list)
    made: int = 0
    stopped: bool = False

    @property
    def address(self) -> str:
        return self.scheduler.server.address

    def channel(self, key: str = "bootstrap") -> grpc.aio.Channel:
        channel = open_channel(self.address, key=read_secret(self.folder / f"{key}.key"))
        self.channels.append(channel)
        return channel

    @property
    def jobs(self) -> Any:
        return SchedulerServiceStub(self.channel())

    @property
    def registry(self) -> Any:
        return ServerRegistryServiceStub(self.channel("service"))

    @property
    def catalog(self) -> Any:
        return CatalogServiceStub(self.channel("service"))

    @property
    def runs(self) -> Any:
        return RunServiceStub(self.channel())

    @property
    def blobs(self) -> Any:
        return BlobServiceStub(self.channel())

    def request_id(self) -> str:
        self.made += 1
        return f"request-{self.made}"

    async def create_job(self, *slots: job_pb2.SlotSpec, **fields: Any) -> job_pb2.Job:
        request = pb.CreateJobRequest(request_id=self.request_id(), job=new_job(*slots, **fields))
        response: pb.CreateJobResponse = await self.jobs.CreateJob(request)
        return response.job

    async def job(self, name: str) -> job_pb2.Job:
        response: pb.GetJobResponse = await self.jobs.GetJob(pb.GetJobRequest(name=name))
        return response.job

    async def until(self, name: str, *states: int, timeout_s: float = 20.0) -> job_pb2.Job:
        """The job once it is in one of the states."""

        async def there() -> bool:
            return (await self.job(name)).state in states

        stub, what = self.jobs, [job_pb2.JobState.Name(state) for state in states]  # type: ignore[arg-type]
        try:
            await wait_until(there, timeout_s, what=f"{name} in {what}")
        except AssertionError as error:
            job = (await stub.GetJob(pb.GetJobRequest(name=name))).job
            raise AssertionError(f"{error}; it is {job}") from None
        return await self.job(name)

    async def servers(self, include_ended: bool = False) -> list[job_pb2.Server]:
        request = pb.ListServersRequest(include_ended=include_ended)
        return list((await self.jobs.ListServers(request)).servers)

    async def renew(self, name: str) -> pb.RenewJobLeaseResponse:
        response: pb.RenewJobLeaseResponse = await self.jobs.RenewJobLease(pb.RenewJobLeaseRequest(name=name))
        return response

    def told(self, server: job_pb2.Server) -> list[dict[str, Any]]:
        """What a fake server was told over its session."""
        path = self.folder / "servers" / server.name.removeprefix("servers/") / "told.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def stop(self) -> None:
        self.stopped = True
        for channel in self.channels:
            await channel.close()
        await self.scheduler.server.drain()
        await self.scheduler.run()


def slot(role: int = job_pb2.SLOT_ROLE_TRAINER, model: str = MODEL, **options: Any) -> job_pb2.SlotSpec:
    count = options.pop("count", None)
    options.setdefault("engine", "noop")
    made = job_pb2.SlotSpec(role=role, base_model=model, options=job_pb2.ServerOptions(**options))  # type: ignore[arg-type]
    if count is not None:
        made.count = count
    return made


def new_job(*slots: job_pb2.SlotSpec, **fields: Any) -> job_pb2.Job:
    fields.setdefault("kind", job_pb2.JOB_KIND_LORA_RL)
    return job_pb2.Job(slots=slots or (slot(),), **fields)


class NamedModels:
    """Knows two models by name and reads no disk."""

    async def resolve(self, model_id: str, field: str) -> Any:
        from opentinker_kit.errors import ServiceError
        from opentinker_scheduler.domain.admission import Model
        from opentinkerapi.runtime.reasons import Reason

        if model_id not in (MODEL, "other-model"):
            raise ServiceError(Reason.UNKNOWN_MODEL, f"known are: {MODEL}, other-model", field=field)
        return Model(model_id, 2048)

    async def known(self) -> list[str]:
        return [MODEL, "other-model"]


StartRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {f"{name}_key_file": make_key_file(tmp_path / f"{name}.key") for name in ("bootstrap", "service")}


@dataclass(frozen=True)
class Records:
    """Where a test keeps its records, and how a scheduler is told."""

    where: Location
    settings: dict[str, Any]

    @property
    def is_postgres(self) -> bool:
        return isinstance(self.where, Postgres)


@pytest.fixture(scope="session")
def empty_tables(postgres_server: PostgresServer) -> str:
    """Name of a PostgreSQL database with all tables and nothing in them, to make others of."""
    name = postgres_server.make_database()
    database = SqlDatabase(Postgres(postgres_server.url(name), postgres_server.password_file))

    async def make() -> None:
        await database.open(datetime.now(UTC))
        await database.close()

    asyncio.run(make())
    return name


@pytest.fixture(scope="session")
def new_postgres(postgres_server: PostgresServer, empty_tables: str) -> Callable[[], Postgres]:
    """Makes databases with all tables and nothing in them."""

    def make() -> Postgres:
        name = postgres_server.make_database(empty_tables)
        return Postgres(postgres_server.url(name), postgres_server.password_file)

    return make


@pytest.fixture
def postgres_records(postgres_server: PostgresServer, empty_tables: str) -> Records:
    url, password = (
        postgres_server.url(postgres_server.make_database(empty_tables)),
        postgres_server.password_file,
    )
    settings = {"database_url": url, "database_password_file": password}
    return Records(Postgres(url, password), settings)


@pytest.fixture
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Records:
    if getattr(request, "param", "sqlite") == "postgres":
        made: Records = request.getfixturevalue("postgres_records")
        return made
    path = tmp_path / "state" / "scheduler.db"
    return Records(path, {"database_file": path})


@pytest.fixture
def scheduler_settings(tmp_path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Settings of a scheduler that starts fake servers and reacts fast."""
    roles = ("trainer", "inference")
    return {
        **keys,
        "state_dir": tmp_path,
        "server_modules": dict.fromkeys(roles, "fake_server"),
        "server_settings": {role: {"server_settings_role": role, "behavior": "normal"} for role in roles},
        "tick_s": 0.05,
        "stop_grace_s": 0.5,
        "drain_s": 3.0,
    }


@pytest.fixture(autouse=True)
def fake_server_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
async def start_rig(
    tmp_path: Path, scheduler_settings: dict[str, Any], records: Records
) -> AsyncIterator[StartRig]:
    """Starts schedulers in one folder; those still running at the end are stopped with their servers."""
    rigs: list[Rig] = []

    async def start(parts: dict[str, Any] | None = None, behavior: str = "normal", **more: Any) -> Rig:
        values = {**scheduler_settings, **records.settings, **more}
        for role in ("trainer", "inference"):
            values["server_settings"][role]["behavior"] = behavior
        scheduler = Scheduler(SchedulerSettings(**values), **{"models": NamedModels(), **(parts or {})})
        await scheduler.start()
        rig = Rig(scheduler, tmp_path)
        rigs.append(rig)
        return rig

    yield start
    for rig in rigs:
        if not rig.stopped:
            await rig.stop()


@pytest.fixture
async def rig(start_rig: StartRig) -> Rig:
    """A scheduler that starts well-behaved fake servers."""
    return await start_rig()


@pytest.fixture
def make_slot() -> Callable[..., job_pb2.SlotSpec]:
    return slot


@pytest.fixture
def make_job() -> Callable[..., job_pb2.Job]:
    return new_job
