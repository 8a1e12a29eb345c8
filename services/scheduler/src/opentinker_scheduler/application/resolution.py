"""Who serves a model now: for those who know a name and want completions."""

from dataclasses import dataclass

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.deployments import Deployments, Seen
from opentinker_scheduler.application.jobs import JobEndpoint, Jobs
from opentinker_scheduler.application.targets import Targets
from opentinker_scheduler.domain import deployments as rules
from opentinker_scheduler.domain.deployments import BASE, DeploymentState
from opentinker_scheduler.domain.model import Job, Role, ServerOptions, SlotSpec
from opentinker_scheduler.domain.names import valid_id
from opentinker_scheduler.domain.records import Target
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name stands for, and how to reach it."""

    target: Target
    slot: SlotSpec
    deployment: str = ""
    job: Job | None = None
    endpoints: tuple[JobEndpoint, ...] = ()
    state_reason: str = ""


class Resolution:
    """Resolves names of models."""

    def __init__(self, database: Database, deployments: Deployments, targets: Targets, jobs: Jobs) -> None:
        self._database = database
        self._deployments = deployments
        self._targets = targets
        self._jobs = jobs

    async def resolve(self, name: str, project: str) -> Resolved:
        """The weights of a name and their servers. INVALID_STATE for a deployment that has failed
        or is paused.
        """
        resolved = await self._database.run(lambda tx: self._look(tx, name, project))
        if resolved.target.policy is not None or resolved.deployment:
            return resolved
        target = await self._base(resolved.target, name, project)
        return Resolved(target, rules.slot_for(target, None, ServerOptions()))

    def _look(self, tx: Transaction, name: str, project: str) -> Resolved:
        if name.startswith("deployments/"):
            return self._deployed(tx, self._deployments.find(tx, name, project), project)
        if name.startswith("policies/"):
            return self._policy(tx, self._targets.find(tx, name, "name", project))
        if valid_id(name) and tx.deployments.find(project, name) is not None:
            return self._deployed(tx, self._deployments.find(tx, f"deployments/{name}", project), project)
        base = name if name.startswith(BASE) else f"{BASE}{name}"
        target = self._targets.find(tx, base, "name", project)
        return Resolved(target, rules.slot_for(target, None, ServerOptions()))

    def _deployed(self, tx: Transaction, seen: Seen, project: str) -> Resolved:
        deployment, job = seen.deployment, seen.job
        target = self._targets.find(tx, deployment.model, "name", project)
        state, text = rules.state_of(job), ""
        if state is DeploymentState.FAILED:
            text = f"{deployment.name} has failed: {rules.why(job)}; promote it to start it again"
        elif state is DeploymentState.PAUSED and job is not None:
            text = f"{deployment.name} is paused: {rules.why(job)}; ResumeJob of {job.name} goes on"
        if text:
            raise ServiceError(Reason.INVALID_STATE, text, metadata={"deployment": deployment.name})
        return Resolved(
            target,
            deployment.slot,
            deployment.name,
            job,
            self._jobs.endpoints(tx, job) if job is not None else (),
            rules.why(job),
        )

    def _policy(self, tx: Transaction, target: Target) -> Resolved:
        """With the servers of the policy's own job, while it runs. Merged, they serve the newest version
        only: another would take turns with it, at the cost of whoever trains there.
        """
        policy = target.policy
        assert policy is not None
        job = tx.jobs.find(policy.job_id) if policy.job_id else None
        slot = rules.slot_for(target, job, ServerOptions())
        newest = target.version == policy.latest_version
        if job is None or not (newest or slot.options.serving_mode == "adapter"):
            return Resolved(target, slot)
        found = self._jobs.endpoints(tx, job)
        endpoints = tuple(endpoint for endpoint in found if endpoint.role is Role.INFERENCE)
        return Resolved(target, slot, job=job if endpoints else None, endpoints=endpoints)

    async def _base(self, target: Target, name: str, project: str) -> Target:
        try:
            return await self._targets.check_base(target, "name")
        except ServiceError as error:
            deployed = await self._database.run(lambda tx: tx.deployments.page(project, None, 100))
            if error.reason is not Reason.UNKNOWN_MODEL or not deployed or name.startswith(BASE):
                raise
            names = ", ".join(deployment.id for deployment in deployed)
            text = f"{error.message}; deployments are: {names}"
            raise ServiceError(Reason.UNKNOWN_MODEL, text, field="name") from None
