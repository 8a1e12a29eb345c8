"""A cluster as its user holds it: jobs, policies, runs. `connect()` (in `opening`) makes one.

with opentinker.connect() as cluster: ...          # or: async with
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc.aio

from opentinker import errors
from opentinker.connection.blobs import Blobs
from opentinker.connection.calls import ControlPlane, answer
from opentinker.connection.jobs import Job, Link, Role, Watcher
from opentinker.connection.on_demand import OnDemand, Slots
from opentinker.connection.portal import Pending, Portal
from opentinker.connection.runs import RunRecord
from opentinker.connection.specs import policy_jobs
from opentinker.training.policy import Policy
from opentinker.training.results import Version
from opentinker.training.tuning import JobOptions, LoRA, ServerOptions, Tuning
from opentinkerapi.scheduler.v1 import job_pb2, log_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from opentinkerapi.trainer.v1 import trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from opentinker.connection.stack import EmbeddedStack
    from opentinker.serving import deployments as deploying
    from opentinker.serving.served import ServedModel

T = TypeVar("T")

active: list["Cluster"] = []
"""Those whose `with` block is open, the innermost last."""

# What not every program needs (files of weights, deployments) is imported where it is used: who only trains
# does not wait for it.


@dataclass(frozen=True, slots=True)
class _NewPolicy:
    """What a CreatePolicy asks for."""

    model: str
    tuning: Tuning
    seed: int
    name: str
    from_checkpoint: str
    files: Sequence[Path]
    """Imported weights."""
    request_id: str


class Cluster:
    """A connection to a scheduler, and everything opened through it. Leaving it ends its jobs."""

    def __init__(
        self,
        portal: Portal,
        control: ControlPlane,
        *,
        embedded: "EmbeddedStack | None" = None,
        watcher: Watcher | None,
    ) -> None:
        self.portal = portal
        self.control = control
        self.blobs = Blobs(control)
        self._embedded = embedded
        self._watcher = watcher
        self._jobs: list[Job] = []
        self._policies: list[Policy] = []
        self.served: list[ServedModel] = []
        """Those that a request was made of."""
        self._records: list[RunRecord] = []
        self._env_channels: dict[str, grpc.aio.Channel] = {}
        self._failed = False
        self._closed = False

    # --- what a user does with it -----------------------------------------------------------------------

    def create_policy(
        self,
        model: str,
        *,
        tuning: Tuning | None = None,
        seed: int = 0,
        name: str = "",
        from_checkpoint: str = "",
        from_weights: str | Path | None = None,
        trainer: ServerOptions | None = None,
        inference: ServerOptions | None = None,
        job: JobOptions | None = None,
        request_id: str | None = None,
        run: str = "",
        beside: Policy | None = None,
        serve: bool = True,
        supervised: bool = False,
    ) -> Pending[Policy]:
        """A policy over a base model, in a job of its own with a trainer and an inference slot.

        Waits until the job runs. `seed` draws the initial adapter and value head. `from_checkpoint`: start
        from the weights and optimizer of a checkpoint. `from_weights`: start from a directory on this
        machine, an adapter as PEFT saves it (rank, alpha and target modules are then the adapter's) or, for
        Full(), a model as transformers saves it. `beside`: in the job of that policy instead, on the same
        servers (a critic, a teacher). `serve=False`: the job has a trainer slot only, and a second job takes
        an inference slot when the policy is first sampled. `job`: its priority and limits. `supervised`: the
        job is one of supervised tuning, for who looks at the queue. Raises UnknownModel, CannotBeSatisfied,
        QuotaExceeded and others for what the cluster can never give.
        """
        chosen = LoRA() if tuning is None else tuning
        files: Sequence[Path] = ()
        if from_weights is not None:
            if from_checkpoint:
                raise errors.invalid("from_weights", "a policy starts from them or from_checkpoint, not both")
            from opentinker.connection import weights

            chosen, files = weights.read_directory(from_weights, tuning)
        if not isinstance(chosen, Tuning):
            raise errors.invalid("tuning", f"{chosen!r} is none of LoRA(...) and Full(...)")
        identifier = request_id or f"policy-{uuid.uuid4().hex}"
        wanted = _NewPolicy(model, chosen, seed, name, from_checkpoint, files, identifier)
        if beside is not None:
            if beside.base_model != model or any((trainer, inference, job)):
                text = f"the servers of {beside.name} hold {beside.base_model}; "
                raise errors.invalid("beside", f"{text}leave trainer, inference and job out")
            return Pending.of(self.portal, self._add_policy(beside.job, beside.serving, wanted))
        spec, later = policy_jobs(
            model, chosen, trainer, inference, job, name=name, run=run, serve=serve, supervised=supervised
        )
        return Pending.of(self.portal, self._create_policy(spec, later, wanted))

    def export(self, name: str, directory: str | Path) -> Pending[Path]:
        """Write the weights of a version or checkpoint, by its name, into a new directory.

        It holds an adapter as PEFT loads it, or a whole model as transformers and vLLM load it, and appears
        whole or not at all. Raises AlreadyExists if something is there, NotFound, DataLoss.
        """
        from opentinker.connection import weights

        return Pending.of(self.portal, weights.export(self.control, self.blobs, name, directory))

    def serve(
        self,
        model: "deploying.Weights",
        name: str,
        *,
        options: ServerOptions | None = None,
        wait: bool = True,
    ) -> "Pending[deploying.Deployment]":
        """Serve a model under a name, without this client, until it is deleted: a base model, a policy (its
        newest version), or the name of a version or checkpoint.

        Waits until it answers, unless told otherwise. `options`: what kind of servers, and how many; default
        as those that the policy was sampled from. Raises AlreadyExists where the name is taken, NotFound,
        UnknownModel, and what is wrong with the weights.
        """
        from opentinker.serving import deployments as deploying

        return Pending.of(self.portal, deploying.create(self, model, name, options, wait=wait))

    def deployment(self, name: str) -> "Pending[deploying.Deployment]":
        """The deployment of a name. NotFound."""
        from opentinker.serving import deployments as deploying

        return Pending.of(self.portal, deploying.find(self, name))

    def deployments(self) -> "Pending[list[deploying.Deployment]]":
        """What is served under a name, newest first."""
        from opentinker.serving import deployments as deploying

        return Pending.of(self.portal, deploying.find_all(self))

    def model(self, name: str) -> "ServedModel":
        """A model to talk to, by the name of a deployment, policy, version, checkpoint or base model."""
        from opentinker.serving.served import ServedModel

        return ServedModel(self, name)

    def info(self) -> Pending[scheduler_service_pb2.GetClusterResponse]:
        """What the cluster has and may start."""
        return Pending.of(self.portal, self._info())

    def jobs(self, *, page_size: int = 100) -> Pending[list[job_pb2.Job]]:
        """The newest jobs, at most so many, whoever made them."""
        from opentinker.connection.project_jobs import ProjectJobs

        return Pending.of(self.portal, ProjectJobs(self.control).jobs(limit=page_size))

    def servers(self) -> Pending[list[job_pb2.Server]]:
        """The trainer and inference servers that run."""
        from opentinker.connection.project_jobs import ProjectJobs

        return Pending.of(self.portal, ProjectJobs(self.control).servers())

    def logs(self, job: str, *, tail_lines: int | None = None) -> Pending[list[log_pb2.LogLine]]:
        """What became of a job and what its servers wrote about it, in order of time; `tail_lines`: only so
        many of the last. `opentinker logs -f` follows it."""
        from opentinker.connection.project_jobs import ProjectJobs

        async def read() -> list[log_pb2.LogLine]:
            return [line async for line in ProjectJobs(self.control).logs(job, tail_lines=tail_lines)]

        return Pending.of(self.portal, read())

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Block until something awaitable ends: the way from plain code to anything asynchronous here."""

        async def run() -> T:
            return await awaitable

        return self.portal.run(run())

    @property
    def api_key(self) -> str:
        """The key of this connection, for other clients of the same cluster."""
        return self.control.key or ""

    @property
    def address(self) -> str:
        """Where its scheduler is."""
        return self.control.address

    @property
    def state_dir(self) -> Path | None:
        """State directory of the embedded stack; None for a cluster elsewhere."""
        return self._embedded.state_dir if self._embedded is not None else None

    def close(self, *, failed: bool = False) -> None:
        """End the jobs and, if this started it, the embedded stack. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self in active:
            active.remove(self)
        try:
            self.portal.run(self.leave(failed))
        finally:
            self.portal.close()
            if self._embedded is not None:
                self._embedded.stop()

    @contextlib.contextmanager
    def active(self) -> Iterator[Self]:
        """Make this the cluster that `fit()` uses, without ending it afterwards."""
        active.append(self)
        try:
            yield self
        finally:
            active.remove(self)

    def __enter__(self) -> Self:
        active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close, failed=kind is not None)

    # --- what the library does with it, on the client's loop ----------------------------------------------

    async def create_run(self, display_name: str, config: Mapping[str, Any], request_id: str) -> RunRecord:
        """A record of a run."""
        record = await RunRecord.create(
            self.control, display_name=display_name, config=config, request_id=request_id
        )
        self._records.append(record)
        return record

    def open_run(self, name: str) -> RunRecord:
        """The record of a run that is there."""
        record = RunRecord(self.control, name)
        self._records.append(record)
        return record

    async def env_channel(self) -> grpc.aio.Channel | None:
        """The channel to the env_host; None where the cluster has none."""
        address = (await self._info()).env_host_address
        if not address:
            return None
        if address not in self._env_channels:
            await self.control.check_tls(address)
            self._env_channels[address] = self.control.open(address)
        return self._env_channels[address]

    async def _info(self) -> scheduler_service_pb2.GetClusterResponse:
        request = scheduler_service_pb2.GetClusterRequest()
        return await self.control.call(lambda channel: SchedulerServiceStub(channel).GetCluster(request))

    async def _create_policy(
        self, spec: job_pb2.Job, later: job_pb2.Job | None, wanted: "_NewPolicy"
    ) -> Policy:
        job = await self.open_job(spec)
        serving = job if later is None else OnDemand(partial(self.open_job, later))
        try:
            return await self._add_policy(job, serving, wanted)
        except BaseException:
            self._jobs.remove(job)
            with contextlib.suppress(errors.OpenTinkerError):
                await job.cancel()
            raise

    async def open_job(self, spec: job_pb2.Job) -> Job:
        """A job of this client, which ends with it."""
        job = await Job.create(self.control, spec, watcher=self._watcher)
        self._jobs.append(job)
        return job

    async def _add_policy(self, job: Job, serving: Slots, wanted: "_NewPolicy") -> Policy:
        imported: list[trainer_service_pb2.WeightFile] = []
        if wanted.files:
            from opentinker.connection import weights

            imported = await weights.upload(wanted.files, self.blobs)

        async def create(link: Link) -> trainer_service_pb2.CreatePolicyResponse:
            request = trainer_service_pb2.CreatePolicyRequest(
                request_id=wanted.request_id,
                job=job.name,
                attempt=link.attempt,
                base_model=wanted.model,
                tuning=wanted.tuning.to_wire(),
                seed=wanted.seed,
                display_name=wanted.name,
                from_checkpoint=wanted.from_checkpoint,
                import_files=imported,
            )
            return await answer(TrainerServiceStub(link.channel).CreatePolicy(request))

        made = await job.through(Role.TRAINER, create)
        published = Version(made.policy.name, made.version.version, made.version.sha256)
        policy = Policy(
            self,
            self.portal,
            job,
            self.blobs,
            name=made.policy.name,
            base_model=wanted.model,
            published=published,
            serving=serving,
        )
        self._policies.append(policy)
        return policy

    async def leave(self, failed: bool) -> None:
        """End everything opened here; the client's loop goes on."""
        for record in self._records:
            await record.close()
        for policy in self._policies:
            await policy.shut()
        for served in self.served:
            await served.close()
        for job in self._jobs:
            # The lease ends what cannot be ended now.
            with contextlib.suppress(errors.OpenTinkerError):
                await (job.finish(failed=True, message="the client failed") if failed else job.finish())
        for channel in self._env_channels.values():
            await channel.close()
        await self.control.close()
