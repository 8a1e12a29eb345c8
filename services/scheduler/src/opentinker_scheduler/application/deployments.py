"""Deployments: a name, what it stands for now, and a job of its own that keeps servers for it.

The job is an ordinary inference job that needs no client. What a deployment serves is a matter of its record
alone: who asks for the name is told the weights (`resolution`), and servers load what they are asked for. So
promoting is one write, no request is refused meanwhile, and those that run end with what they began with.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import save_job
from opentinker_scheduler.application.jobs import Jobs, NewJob
from opentinker_scheduler.application.targets import Targets
from opentinker_scheduler.domain import deployments as rules
from opentinker_scheduler.domain import jobs as job_rules
from opentinker_scheduler.domain.model import Job, JobKind, OnClientLoss, ServerOptions, SlotSpec
from opentinker_scheduler.domain.names import require
from opentinker_scheduler.domain.records import Deployment, Target
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

MODEL = "deployment.model"


@dataclass(frozen=True, slots=True)
class NewDeployment:
    """What a user asks for."""

    id: str
    model: str
    replicas: int
    options: ServerOptions
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """A deployment and its job, as they are."""

    deployment: Deployment
    job: Job | None


Change = Callable[[Deployment], Deployment]


class Deployments:
    """See the module's text. Methods with a transaction are called inside one, the others before it."""

    def __init__(self, database: Database, targets: Targets, jobs: Jobs, clock: Clock) -> None:
        self._database = database
        self._targets = targets
        self._jobs = jobs
        self._clock = clock

    async def plan(self, asked: NewDeployment, project: str) -> tuple[Target, NewJob]:
        """What would be served and by which job; or why it cannot be."""
        rules.check_id(asked.id)

        def look(tx: Transaction) -> tuple[Target, Job | None]:
            target = self._targets.find(tx, asked.model, MODEL, project)
            return target, _own_job(tx, target)

        target, own_job = await self._database.run(look)
        target = await self._targets.check_base(target, MODEL)
        slot = rules.slot_for(target, own_job, asked.options, asked.replicas)
        if asked.exclusive:
            slot = replace(slot, exclusive=True)
        job = await self._admit(asked.id, slot)
        rules.check_fits(target, job.slots[0].base_model, job.slots[0], f"deployments/{asked.id}")
        return target, job

    def create(
        self, tx: Transaction, deployment_id: str, target: Target, new: NewJob, project: str
    ) -> Deployment:
        """Record a planned deployment and its job. ALREADY_REGISTERED where the id is taken."""
        if tx.deployments.find(project, deployment_id) is not None:
            name = f"deployments/{deployment_id}"
            text = f"there is {name} already; promote it, delete it, or choose another id"
            raise ServiceError(
                Reason.ALREADY_REGISTERED, text, field="deployment_id", metadata={"name": name}
            )
        if target.policy is not None:
            self._targets.find(tx, target.model, MODEL, project)  # it may have been deleted meanwhile
        job, now = self._jobs.create(tx, new, project), self._clock.now()
        return tx.deployments.add(
            Deployment(
                id=deployment_id,
                project=project,
                model=target.model,
                slot=new.slots[0],
                job_id=job.id,
                create_time=now,
                update_time=now,
            )
        )

    def find(self, tx: Transaction, name: str, project: str) -> Seen:
        """DEPLOYMENT_NOT_FOUND."""
        (deployment_id,) = require(name, Reason.DEPLOYMENT_NOT_FOUND, "deployment", "deployments")
        deployment = tx.deployments.find(project, deployment_id)
        if deployment is None:
            raise ServiceError(Reason.DEPLOYMENT_NOT_FOUND, f"there is no {name}", field="name")
        return Seen(deployment, tx.jobs.find(deployment.job_id))

    async def plan_promotion(self, name: str, model: str, project: str) -> tuple[Target, NewJob]:
        """What would be served from now on, and a job to serve it where the last one has ended."""

        def look(tx: Transaction) -> tuple[Deployment, Target]:
            deployment = self.find(tx, name, project).deployment
            return deployment, self._targets.find(tx, model or _before(deployment), "model", project)

        deployment, target = await self._database.run(look)
        target = await self._targets.check_base(target, "model")
        slot = replace(deployment.slot, base_model=target.base_model)
        job = await self._admit(deployment.id, slot)
        rules.check_fits(target, job.slots[0].base_model, deployment.slot, name)
        return target, job

    def promote(self, tx: Transaction, name: str, target: Target, again: NewJob, project: str) -> Deployment:
        """Serve a planned target from now on."""
        now = self._clock.now()
        return self._change(tx, name, again, project, lambda d: rules.promoted(d, target.model, now))

    def roll_back(self, tx: Transaction, name: str, again: NewJob, project: str) -> Deployment:
        """Serve what was served before."""
        now = self._clock.now()
        return self._change(tx, name, again, project, lambda d: rules.rolled_back(d, now))

    def delete(self, tx: Transaction, name: str, project: str) -> None:
        """End a deployment and its job."""
        seen = self.find(tx, name, project)
        tx.deployments.delete(seen.deployment)
        if seen.job is not None and not seen.job.state.final:
            now = self._clock.now()
            ended = job_rules.cancelled(seen.job, f"{name} was deleted", now)
            save_job(tx, seen.job, ended, now)

    async def _admit(self, deployment_id: str, slot: SlotSpec) -> NewJob:
        """The job of a deployment; what it may not ask for is named as the deployment's caller wrote it."""
        try:
            return await self._jobs.admit(_new_job(deployment_id, slot))
        except ServiceError as error:
            names = (("job.slots[0].count", "deployment.replicas"), ("job.slots[0].", "deployment."))
            for old, new in names:
                error.violations = tuple((name.replace(old, new), text) for name, text in error.violations)
            raise

    def _change(self, tx: Transaction, name: str, again: NewJob, project: str, change: Change) -> Deployment:
        seen = self.find(tx, name, project)
        after = change(seen.deployment)
        if not after.model.startswith(rules.BASE):
            self._targets.find(tx, after.model, "model", project)
        if seen.job is None or seen.job.state.final:
            after = replace(after, job_id=self._jobs.create(tx, again, project).id)
        tx.deployments.save(after)
        return after


def _new_job(deployment_id: str, slot: SlotSpec) -> NewJob:
    return NewJob(
        kind=JobKind.INFERENCE,
        slots=(slot,),
        display_name=f"deployment {deployment_id}",
        on_client_loss=OnClientLoss.DETACH,
        lease_ttl_s=0.0,
        labels={"deployment": deployment_id},
        run="",
    )


def _own_job(tx: Transaction, target: Target) -> Job | None:
    job_id = target.policy.job_id if target.policy is not None else ""
    return tx.jobs.find(job_id) if job_id else None


def _before(deployment: Deployment) -> str:
    """What a roll-back goes to; where there is nothing, `roll_back` refuses it."""
    return deployment.history[0] if deployment.history else deployment.model
