"""The policies that a run trains at once: one, or several that play with or against each other."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from opentinker.connection.cluster import Cluster
from opentinker.loop.learner import Learned, Learner
from opentinker.loop.settings import Plan
from opentinker.rollout.trajectory import Batch
from opentinker.sampling import identity
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint
from opentinker.training.spread import spread


@dataclass(frozen=True, slots=True)
class Trained:
    """One policy that is trained, under its name in the run, with the critic that it may have."""

    name: str
    policy: Policy
    critic: Policy | None
    learner: Learner


class Team:
    """All policies of a run; the first one made the job, on whose servers the others are, too."""

    def __init__(self, members: list[Trained]) -> None:
        self.members = members

    @classmethod
    async def create(
        cls, plan: Plan, cluster: Cluster, run: str, working_on: Callable[[str], Awaitable[None]]
    ) -> "Team":
        """Make the policies, with the weights that they start from. `working_on` is told the job's name."""
        members: list[Trained] = []
        for name in plan.policies:
            # With one policy, names and seeds are as they always were.
            named = (name,) if members else ()
            display = f"{plan.name} {' '.join(named)}".strip()
            seed = identity.seed(plan.seed, "adapter", *named)
            policy = (
                await cluster.create_policy(
                    plan.model, tuning=plan.policy_tuning, seed=seed, name=display, beside=members[0].policy
                )
                if members
                else await cluster.create_policy(
                    plan.model,
                    tuning=plan.policy_tuning,
                    seed=seed,
                    name=display,
                    trainer=plan.trainer,
                    inference=plan.inference,
                    job=plan.job,
                    run=run,
                )
            )
            policy.renderer = plan.renderer
            if not members:
                await working_on(policy.job.name)
            critic = None
            if plan.critic_tuning is not None:
                critic = await cluster.create_policy(
                    plan.model,
                    tuning=plan.critic_tuning,
                    seed=identity.seed(plan.seed, "critic", *named),
                    name=f"{display} critic".strip(),
                    beside=policy,
                )
            members.append(Trained(name, policy, critic, Learner(plan, policy, critic)))
        for each in members:
            await _start(plan, each)
        return cls(members)

    @property
    def first(self) -> Trained:
        """The run's own."""
        return self.members[0]

    @property
    def step(self) -> int:
        """Optimizer steps taken, by all together."""
        return sum(each.policy.step for each in self.members)

    @property
    def versions(self) -> dict[str, int]:
        """The newest of each by name."""
        return {each.name: each.policy.version for each in self.members}

    @property
    def policies(self) -> dict[str, Policy]:
        """By name."""
        return {each.name: each.policy for each in self.members}

    async def learn(self, batch: Batch, step: int) -> Learned:
        """Everything that a batch teaches each of them. With several, metrics bear the policy's name."""
        if len(self.members) == 1:
            return await self.first.learner.learn(batch, step)
        row: dict[str, float] = {}
        parts: list[Learned] = []
        for each in self.members:
            own = batch.of_policy(each.name)
            learned = await each.learner.learn(own, step)
            parts.append(learned)
            told = learned.row | spread("critic/score", own.rewards)
            told["training/skipped"] = float(not learned.updated)
            row |= {f"{each.name}/{name}": value for name, value in told.items()}
        # What the loop and its table look at is of the whole run.
        row["training/nonfinite_skips"] = max(part.row.get("training/nonfinite_skips", 0.0) for part in parts)
        row |= {
            name: sum(part.row.get(name, 0.0) for part in parts)
            for name in sorted({name for part in parts for name in part.row if name.startswith("timing_s/")})
        }
        inert = all(part.inert for part in parts)
        return Learned(row, inert=inert, updated=any(part.updated for part in parts))

    async def save(self, step: int) -> tuple[Checkpoint, dict[str, Any]]:
        """Checkpoints of all; the first one's, and what else the loop must know of them."""
        saved = {each.name: await each.learner.save(self._display(each, step)) for each in self.members}
        state = self.first.learner.state()
        if len(self.members) > 1:
            state["policies"] = {
                each.name: {"checkpoint": saved[each.name].name, "version": each.policy.version}
                | each.learner.state()
                for each in self.members
            }
        return saved[self.first.name], state

    def _display(self, each: Trained, step: int) -> str:
        return f"step {step}" if len(self.members) == 1 else f"step {step}, {each.name}"


async def _start(plan: Plan, each: Trained) -> None:
    """Give a policy the weights that it starts from, and make them its next version. A critic with the same
    tuning starts from them too, its head new: it then knows what the policy knows.
    """
    if not plan.from_checkpoint:
        return
    await each.policy.restore(plan.from_checkpoint, weights_only=True)
    if each.critic is not None and plan.critic_tuning == replace(plan.tuning, value_head=True):
        await each.critic.restore(plan.from_checkpoint, weights_only=True)
    version = await each.policy.publish()
    await each.policy.load(version.version)
