"""A cluster with two tenants, for the access matrix: every service for real, without an engine that computes.

Project A owns one of everything; project B looks at it from outside. What each RPC is asked with is in
`access_rows`.
"""

import asyncio
import contextlib
import hashlib
import io
import shutil
import uuid
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from opentinker_env_host.adapters.jails import default_folder
from opentinker_env_host.bootstrap import build as build_env_host
from opentinker_env_host.settings import EnvHostSettings, EnvironmentSettings
from opentinker_inference.bootstrap import InferenceServer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.blob_keys import blob_key
from opentinker_kit.files import make_key_file
from opentinker_kit.job_tokens import INFERENCE, JobClaims, TokenSigner
from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.settings import read_secret
from opentinker_kit.testing import wait_until
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.settings import SchedulerSettings
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.catalog.v1 import catalog_service_pb2, policy_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.env.v1 import env_host_service_pb2, package_pb2, snapshot_pb2
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceStub
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub
from opentinkerapi.runtime.channels import auth_metadata, open_channel
from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.scheduler.v1 import account_pb2, account_service_pb2, job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceStub
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

DEPLOYMENT = "served-by-a"
DATA, SHARED = b"what a uploaded", b"what both uploaded"
SHA, SHARED_SHA = hashlib.sha256(DATA).hexdigest(), hashlib.sha256(SHARED).hexdigest()
ROLES = {
    "viewer": account_pb2.ROLE_VIEWER,
    "member": account_pb2.ROLE_MEMBER,
    "admin": account_pb2.ROLE_ADMIN,
}


@dataclass(frozen=True)
class World:
    """Names of what there is, keys and tokens of who looks at it, and where."""

    addresses: dict[str, str]
    """By service, its name without the package."""
    model: str
    keys: dict[str, str] = field(default_factory=dict)
    """viewer, member and admin of A; other, an admin of B; expired, revoked; bootstrap and service."""
    tokens: dict[str, str] = field(default_factory=dict)
    """own, of A's job; sibling, of another job of A; other, of B's; expired; sampling, for inference only;
    stale, of the job's attempt before it had its slots; forged, with another key.
    """
    project: str = ""
    user: str = ""
    api_key: str = ""
    job: str = ""
    attempt: int = 0
    policy: str = ""
    checkpoint: str = ""
    deployment: str = f"deployments/{DEPLOYMENT}"
    run: str = ""
    episode: str = ""
    snapshot: str = ""
    package: str = "environments/secret-of-a@1"
    blob: str = SHA

    def nowhere(self) -> "World":
        """The same with names that nothing has: a call that is allowed finds nothing to change."""
        return replace(
            self,
            project="projects/none",
            user="users/none",
            api_key="apiKeys/none",
            job="jobs/none",
            policy="policies/none",
            checkpoint="policies/none/checkpoints/none",
            deployment="deployments/none",
            run="runs/none",
            episode="episodes/none-0",
            snapshot="snapshots/none",
            package="environments/none@1",
            blob="0" * 64,
        )

    @property
    def secrets_of_a(self) -> list[str]:
        """Names that nobody outside A may read anywhere."""
        return [
            self.job,
            self.policy,
            self.run,
            self.api_key,
            DEPLOYMENT,
            self.user,
            self.project,
            "secret-of-a",
        ]

    async def ask(
        self, method: MethodDescriptor, requests: list[Message], key: str, token: str = ""
    ) -> tuple[str, str]:
        """The reason that a call is refused with, or OK; and its first answer as text."""
        service = method.containing_service
        path = f"/{service.full_name}/{method.name}"
        response_class = message_factory.GetMessageClass(method.output_type)
        metadata = auth_metadata(key, token)
        async with open_channel(self.addresses[service.name]) as channel:
            kinds = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, False): channel.stream_unary,
                (True, True): channel.stream_stream,
            }
            kind: Any = kinds[method.client_streaming, method.server_streaming]
            call = kind(path, lambda message: message.SerializeToString(), response_class.FromString)
            given: Any = iter(requests) if method.client_streaming else requests[0]
            running = call(given, metadata=metadata, timeout=20.0)
            try:
                answer = await (running.read() if method.server_streaming else running)
            except grpc.RpcError as error:
                return str(from_rpc_error(error).reason), ""
            finally:
                running.cancel()
        return "OK", "" if answer is grpc.aio.EOF else str(answer)

    async def ask_all(
        self, method: MethodDescriptor, requests: list[Message], key: str, token: str = ""
    ) -> str:
        """The reason that a stream of these ends with, after all that it answers."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        response_class = message_factory.GetMessageClass(method.output_type)
        async with open_channel(self.addresses[method.containing_service.name]) as channel:
            kind: Any = channel.stream_stream
            call = kind(path, lambda message: message.SerializeToString(), response_class.FromString)
            try:
                async for _ in call(iter(requests), metadata=auth_metadata(key, token), timeout=20.0):
                    pass
            except grpc.RpcError as error:
                return str(from_rpc_error(error).reason)
        return "OK"


@contextlib.asynccontextmanager
async def open_world(folder: Path, model_dir: Path) -> AsyncIterator[World]:
    """Start everything, and make what the matrix needs."""
    keys = {name: make_key_file(folder / f"{name}.key") for name in ("bootstrap", "service")}
    files = {f"{name}_key_file": path for name, path in keys.items()}
    store = MemoryObjectStore()
    scheduler = Scheduler(
        SchedulerSettings(**files, state_dir=folder / "scheduler", launcher="static", tick_s=0.05),
        store=store,
    )
    address = f"127.0.0.1:{await scheduler.start()}"
    served: dict[str, Any] = {
        **files,
        "scheduler_address": address,
        "require_job_tokens": True,
        "drain_s": 1.0,
    }
    model = str(model_dir)
    trainer = TrainerServer(
        TrainerSettings(base_model=model, engine="noop", state_dir=folder / "trainer", **served),
        objects=store,
    )
    inference = InferenceServer(
        InferenceSettings(
            base_model=model,
            engine="noop",
            allow_any_model_dir=True,
            state_dir=folder / "inference",
            **served,
        ),
        objects=store,
    )
    game = EnvironmentSettings(target="opentinker.environments.builtin:GuessNumber")
    env_host = build_env_host(
        EnvHostSettings(environments={"game": game}, state_dir=folder / "env_host", **served)
    )
    ports = await asyncio.gather(trainer.start(), inference.start(), env_host.start())
    at = [f"127.0.0.1:{port}" for port in ports]
    addresses = {
        **dict.fromkeys(
            (
                "SchedulerService",
                "ServerRegistryService",
                "AccountService",
                "CatalogService",
                "RunService",
                "BlobService",
            ),
            address,
        ),
        "TrainerService": at[0],
        "InferenceService": at[1],
        "EnvHostService": at[2],
    }
    secret = {name: read_secret(path) for name, path in keys.items()}
    try:
        made = World(addresses, model, secret)
        made = await _make_accounts(made)
        signer = TokenSigner(read_secret(folder / "scheduler" / "job_tokens.key"))
        yield await _make_rest(made, store, signer)
    finally:
        await inference.close()
        trainer.server.request_drain()
        await trainer.run()
        await env_host.server.drain()
        await env_host.stop()
        shutil.rmtree(default_folder(folder / "env_host"), ignore_errors=True)
        await scheduler.server.drain()
        await scheduler.run()


async def _make_accounts(world: World) -> World:
    """Users of both projects, with keys that work and keys that do not any more."""
    pb = account_service_pb2
    keys = dict(world.keys)
    async with open_channel(world.addresses["AccountService"], key=keys["bootstrap"]) as channel:
        stub = AccountServiceStub(channel)

        async def project(name: str) -> str:
            request = pb.CreateProjectRequest(
                request_id=_id(), project=account_pb2.Project(display_name=name)
            )
            return str((await stub.CreateProject(request)).project.name)

        async def key(project: str, name: str, role: int, ttl_s: float = 0.0) -> pb.CreateApiKeyResponse:
            user = account_pb2.User(display_name=name)
            made = (await stub.CreateUser(pb.CreateUserRequest(request_id=_id(), user=user))).user.name
            member: Any = {"project": project, "user": made, "role": role}
            await stub.SetMember(pb.SetMemberRequest(request_id=_id(), **member))
            request = pb.CreateApiKeyRequest(request_id=_id(), project=project, user=made)
            if ttl_s:
                request.ttl.FromTimedelta(timedelta(seconds=ttl_s))
            return await stub.CreateApiKey(request)

        a, b = await project("a"), await project("b")
        for role, number in ROLES.items():
            answer = await key(a, f"{role} of a", number)
            keys[role] = answer.key
        user, api_key = answer.api_key.user, answer.api_key.name
        keys["other"] = (await key(b, "admin of b", account_pb2.ROLE_ADMIN)).key
        keys["expired"] = (await key(a, "once of a", account_pb2.ROLE_ADMIN, ttl_s=0.01)).key
        revoked = await key(a, "formerly of a", account_pb2.ROLE_ADMIN)
        keys["revoked"] = revoked.key
        await stub.RevokeApiKey(pb.RevokeApiKeyRequest(request_id=_id(), name=revoked.api_key.name))
    keys["unknown"] = "otk_nobodys"
    return replace(world, keys=keys, project=a, user=user, api_key=api_key)


async def _make_rest(world: World, store: MemoryObjectStore, signer: TokenSigner) -> World:
    """Jobs of both projects; in A a policy with a checkpoint, a deployment, a run, an episode, blobs."""
    lease = await _run_job(world, world.keys["member"])
    sibling = await _run_job(world, world.keys["member"])
    other = await _run_job(world, world.keys["other"])
    job, attempt = lease.job.name, lease.job.attempt
    project = world.project.removeprefix("projects/")
    claims = JobClaims(job, project, attempt, ("trainer", "inference", "env_host"), expires=0.0)
    far = replace(claims, audience=(INFERENCE,), expires=4e9)
    tokens = {
        "own": lease.job_token,
        "sibling": sibling.job_token,
        "other": other.job_token,
        "expired": signer.sign(claims),
        "sampling": signer.sign(far),
        "stale": signer.sign(replace(claims, attempt=attempt - 1, expires=4e9)),
        "forged": TokenSigner("another cluster's").sign(replace(claims, expires=4e9)),
    }
    world = replace(world, tokens=tokens, job=job, attempt=attempt)
    for data, owner in ((DATA, project), (SHARED, project), (SHARED, other.job.project)):
        await store.put(blob_key(hashlib.sha256(data).hexdigest(), owner), data)
    world = await _make_policy(world)
    async with open_channel(world.addresses["CatalogService"], key=world.keys["member"]) as channel:
        request = catalog_service_pb2.CreateDeploymentRequest(request_id=_id(), deployment_id=DEPLOYMENT)
        request.deployment.model = f"{world.policy}/versions/0"
        await CatalogServiceStub(channel).CreateDeployment(request)
        runs = RunServiceStub(channel)
        run = (
            await runs.CreateRun(run_service_pb2.CreateRunRequest(request_id=_id(), run=run_pb2.Run()))
        ).run.name
        state = run_service_pb2.PutLoopStateRequest(request_id=_id(), run=run)
        state.loop_state.step = 1
        await runs.PutLoopState(state)
    async with open_channel(world.addresses["EnvHostService"], key=world.keys["member"]) as channel:
        await EnvHostServiceStub(channel).UploadPackage(_package())
    async with open_channel(world.addresses["EnvHostService"], job_token=tokens["own"]) as channel:
        group = env_host_service_pb2.OpenGroupRequest(
            request_id=_id(), environment="environments/game", size=1, seed=1
        )
        env_hosts = EnvHostServiceStub(channel)
        episode = (await env_hosts.OpenGroup(group)).episodes[0]
        await env_hosts.Begin(env_host_service_pb2.BeginRequest(episode=episode))
        taken = await env_hosts.Snapshot(snapshot_pb2.SnapshotRequest(request_id=_id(), episode=episode))
    return replace(world, run=run, episode=episode, snapshot=taken.snapshot)


async def _run_job(world: World, key: str) -> jobs_pb2.RenewJobLeaseResponse:
    """A job that runs, as its client sees it."""
    slots = [
        job_pb2.SlotSpec(role=role, base_model=world.model, options=job_pb2.ServerOptions(engine="noop"))
        for role in (job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE)
    ]
    request = jobs_pb2.CreateJobRequest(
        request_id=_id(), job=job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=slots)
    )
    async with open_channel(world.addresses["SchedulerService"], key=key) as channel:
        stub = SchedulerServiceStub(channel)

        async def create() -> str:
            # Until the servers have registered themselves nothing can be offered.
            with contextlib.suppress(grpc.RpcError):
                return str((await stub.CreateJob(request)).job.name)
            return ""

        name = await _until(create)

        async def renew() -> jobs_pb2.RenewJobLeaseResponse | None:
            lease = await stub.RenewJobLease(jobs_pb2.RenewJobLeaseRequest(name=name))
            return lease if lease.endpoints else None

        return await _until(renew)


async def _until(look: Any) -> Any:
    found: list[Any] = []

    async def there() -> bool:
        found.append(await look())
        return bool(found[-1])

    await wait_until(there, 30.0, what="what the access matrix needs")
    return found[-1]


async def _make_policy(world: World) -> World:
    async with open_channel(world.addresses["TrainerService"], job_token=world.tokens["own"]) as channel:
        stub = TrainerServiceStub(channel)
        made = await stub.CreatePolicy(
            trainer_service_pb2.CreatePolicyRequest(
                request_id=_id(),
                job=world.job,
                attempt=world.attempt,
                base_model=world.model,
                tuning=policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=4)),
            )
        )
        header = operation_pb2.OperationHeader(
            policy=made.policy.name, seq=1, request_id=_id(), attempt=world.attempt
        )
        await stub.SaveCheckpoint(trainer_service_pb2.SaveCheckpointRequest(header=header))
        request = trainer_service_pb2.GetOperationRequest(policy=made.policy.name, seq=1)
        request.wait.FromSeconds(20)
        done = (await stub.GetOperation(request)).operation
    assert done.state == operation_pb2.OPERATION_STATE_DONE, done
    return replace(world, policy=made.policy.name, checkpoint=done.save_checkpoint.checkpoint.name)


def _package() -> package_pb2.UploadPackageRequest:
    """An environment of A's own. That it fails to import is of no account here."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("game.py", "")
    spec = package_pb2.PackageSpec(target="game:Game")
    return package_pb2.UploadPackageRequest(
        request_id=_id(), environment_id="secret-of-a", spec=spec, archive=buffer.getvalue()
    )


def _id() -> str:
    return uuid.uuid4().hex
