"""A batch, turned into optimizer steps: scores, advantages, the objective, updates of policy and critic."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinker.loop import metrics as measure
from opentinker.loop import self_check
from opentinker.loop.algorithms import ActorCritic, Critic
from opentinker.loop.scoring import Scores, divergence, score
from opentinker.loop.settings import Plan
from opentinker.rollout.trajectory import Batch
from opentinker.sampling import identity
from opentinker.training import kl
from opentinker.training.advantages import overlong_penalty
from opentinker.training.aggregation import aggregate
from opentinker.training.episodes import Episodes, credit, gather
from opentinker.training.losses import Component, PolicyLoss
from opentinker.training.operations import Operation
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint, ForwardBackwardResult, StepResult
from opentinker.training.samples import TrainSample, TrainSamples
from opentinker.training.token_losses import KL, Entropy, Value


@dataclass(frozen=True, slots=True)
class Learned:
    """What became of a batch. `inert`: no advantage differs from 0; `updated`: optimizer steps were taken."""

    row: dict[str, float]
    inert: bool
    updated: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one optimizer step, with what their losses are divided by."""

    rows: TrainSamples
    denominator: float


@dataclass(slots=True)
class _Updates:
    """Operations under way on one policy."""

    gradients: list[Operation[ForwardBackwardResult]] = field(default_factory=list)
    steps: list[Operation[StepResult]] = field(default_factory=list)

    async def ended(self) -> tuple[list[ForwardBackwardResult], list[StepResult]]:
        return [await each for each in self.gradients], [await each for each in self.steps]


class Learner:
    """Trains a policy, and its critic where there is one. Everything it remembers from batch to batch is in
    `state()`.
    """

    def __init__(self, plan: Plan, policy: Policy, critic_policy: Policy | None = None) -> None:
        self._plan = plan
        self._algorithm = plan.algorithm
        self._policy = policy
        self._critic_policy = critic_policy
        self._critic: Critic | None = (
            plan.algorithm.critic if isinstance(plan.algorithm, ActorCritic) else None
        )
        self._checked = plan.logprob_check is False
        penalty = plan.algorithm.kl
        self._coefficient: float | kl.AdaptiveKL = penalty.coefficient if penalty is not None else 0.0

    @property
    def kl_coefficient(self) -> float:
        """Of the KL penalty now."""
        held = self._coefficient
        return held.coefficient if isinstance(held, kl.AdaptiveKL) else float(held)

    def state(self) -> dict[str, Any]:
        """For the loop's state beside a checkpoint, as JSON values."""
        state: dict[str, Any] = {}
        if self._algorithm.kl is not None:
            state["kl_coefficient"] = self.kl_coefficient
        if self._critic_policy is not None and self._critic_policy.checkpoint is not None:
            state["critic_checkpoint"] = self._critic_policy.checkpoint.name
        return state

    async def save(self, display_name: str) -> Checkpoint:
        """Checkpoints of the policy and of its critic; gives the policy's."""
        saved = self._policy.save_checkpoint(display_name)
        if self._critic_policy is not None:
            await self._critic_policy.save_checkpoint(f"{display_name}, critic")
        return await saved

    async def learn(self, batch: Batch, step: int) -> Learned:
        """Everything that a batch teaches. Takes no optimizer step where nothing could move."""
        algorithm = self._algorithm
        episodes = gather(batch, algorithm.zero_variance)
        if not episodes.rows:
            return Learned(episodes.metrics, inert=True, updated=False)
        scores = None
        if self._critic is not None or algorithm.kl_shapes:
            scores = await self._score(episodes.rows)
        samples = self._credit(episodes, scores)
        if not self._moves(samples):
            return Learned(samples.metrics, inert=True, updated=False)
        scores = scores if scores is not None else await self._score(episodes.rows)
        row = samples.metrics | scores.seconds | await self._check(samples, scores)
        row |= self._of_scores(samples, scores)
        row |= await self._update(TrainSamples(scores.attach(samples), samples.metrics), step)
        if isinstance(self._coefficient, kl.AdaptiveKL):
            # For the next batch: this one was penalized by one coefficient throughout.
            self._coefficient = self._coefficient.update(row["actor/reference_kl"], len(samples))
        return Learned(row, inert=self._critic is None and samples.inert, updated=True)

    async def _score(self, rows: Sequence[TrainSample]) -> Scores:
        algorithm = self._algorithm
        return await score(
            self._policy,
            rows,
            proximal=algorithm.needs_proximal,
            penalty=algorithm.kl,
            critic=self._critic,
            critic_policy=self._critic_policy,
        )

    async def _check(self, samples: TrainSamples, scores: Scores) -> dict[str, float]:
        """The self-check, before the first update only."""
        if self._checked:
            return {}
        bound = None if self._plan.logprob_check is True else float(self._plan.logprob_check)
        found = await self_check.check(self._policy, samples, bound=bound, scored=scores.proximal)
        self._checked = True
        return found.metrics()

    def _credit(self, episodes: Episodes, scores: Scores | None) -> TrainSamples:
        algorithm, penalty = self._algorithm, self._algorithm.kl
        bonus, token_bonus, adjustment = None, None, None
        if algorithm.overlong is not None:
            limit = algorithm.overlong.max_tokens or self._plan.sampling.max_tokens
            assert limit is not None, "checked by the plan"
            bonus = overlong_penalty(
                [trajectory.sampled_tokens for trajectory in episodes.trajectories],
                max_tokens=limit,
                buffer_tokens=algorithm.overlong.buffer_tokens,
                factor=algorithm.overlong.factor,
            )
        if penalty is not None and algorithm.kl_shapes:
            assert scores is not None
            estimates = divergence(penalty, episodes.rows, scores)
            if penalty.where == "reward":
                token_bonus = [-self.kl_coefficient * each for each in estimates]
            else:
                masks = [np.asarray(row.loss_mask) for row in episodes.rows]
                adjustment = [-self.kl_coefficient * each for each in kl.centred(estimates, masks)]
        return credit(
            episodes,
            algorithm.estimator,
            bonus=bonus,
            token_bonus=token_bonus,
            values=scores.values if scores is not None else None,
            adjustment=adjustment,
        )

    def _moves(self, samples: TrainSamples) -> bool:
        """Whether any component can change a weight."""
        algorithm = self._algorithm
        others = (
            self._critic is not None
            or algorithm.entropy_coefficient > 0
            or (algorithm.kl is not None and algorithm.kl.where == "loss")
            or not isinstance(algorithm.loss, PolicyLoss)
        )
        return samples.loss_tokens > 0 and (others or not samples.inert)

    def _of_scores(self, samples: TrainSamples, scores: Scores) -> dict[str, float]:
        """Metrics of what was scored."""
        row: dict[str, float] = {}
        penalty = self._algorithm.kl
        if penalty is not None:
            estimates = divergence(penalty, samples, scores)
            mean = float(sum(each.sum() for each in estimates)) / samples.loss_tokens
            row |= {"actor/reference_kl": mean, "actor/kl_coef": self.kl_coefficient}
        if scores.values is not None:
            row |= measure.of_values(samples)
        return row

    async def _update(self, samples: TrainSamples, step: int) -> dict[str, float]:
        """Every optimizer step on the batch and the new version, all under way at once, in order."""
        started = time.monotonic()
        actor, critic = _Updates(), _Updates()
        optimizer = self._plan.optimizer_at(step)
        warming = self._critic is not None and not self._critic.shared and step <= self._critic.warmup
        for part in self._parts(samples, step):
            if self._critic_policy is not None:
                self._update_critic(part, step, critic)
            if warming or not self._moves(part.rows):
                continue
            actor.gradients.append(
                self._policy.forward_backward(part.rows, self._terms(part.denominator), skip_inert=True)
            )
            actor.steps.append(self._policy.optim_step(optimizer))
        publication = self._policy.publish() if actor.steps else None
        row = measure.of_critic(*await critic.ended(), self._critic_rate(step)) if critic.steps else {}
        row |= measure.of_update(samples, *await actor.ended(), optimizer.lr)
        # A critic that learns nothing any more ends a run as a policy does.
        skips = (row.get(f"{name}/nonfinite_skips", 0.0) for name in ("training", "critic"))
        row["training/nonfinite_skips"] = max(skips)
        updated = time.monotonic()
        row["timing_s/update_actor"] = updated - started
        if publication is not None:
            version = await publication
            loading = await self._policy.load(version.version)
            row["timing_s/update_weights"] = time.monotonic() - updated
            row["timing_s/engine_update_weights"] = version.engine_seconds + loading
        return row

    def _update_critic(self, part: _Part, step: int, updates: _Updates) -> None:
        assert self._critic is not None
        assert self._critic_policy is not None
        optimizer = self._critic.optimizer or self._plan.optimizer
        terms = {"value": Component(Value(self._critic.clip), denominator=part.denominator)}
        rows = [replace(row, components=()) for row in part.rows]
        updates.gradients.append(self._critic_policy.forward_backward(rows, terms))
        updates.steps.append(self._critic_policy.optim_step(replace(optimizer, lr=self._critic_rate(step))))

    def _critic_rate(self, step: int) -> float:
        assert self._critic is not None
        rate = self._critic.learning_rate
        if rate is None:
            return self._plan.optimizer_at(step).lr
        return rate(step) if callable(rate) else rate

    def _terms(self, denominator: float) -> dict[str, Component]:
        """The objective of one optimizer step."""
        algorithm = self._algorithm
        terms = {algorithm.loss.component: Component(algorithm.policy_loss, denominator=denominator)}
        penalty = algorithm.kl
        if penalty is not None and penalty.where == "loss":
            loss = KL(penalty.chosen, penalty.importance_weighted)
            terms["kl"] = Component(loss, self.kl_coefficient, denominator)
        if algorithm.entropy_coefficient:
            terms["entropy"] = Component(Entropy(), algorithm.entropy_coefficient, denominator)
        if self._critic is not None and self._critic.shared:
            terms["value"] = Component(Value(self._critic.clip), self._critic.coefficient, denominator)
        return terms

    def _parts(self, samples: TrainSamples, step: int) -> list[_Part]:
        """The batch, once a pass, dealt into mini-batches as a pure function of the seed. Each is divided by
        its own denominator, rows that cannot contribute included.
        """
        algorithm = self._algorithm
        parts = []
        for epoch in range(algorithm.epochs):
            order: NDArray[np.int64] = np.arange(len(samples))
            if algorithm.updates > 1:
                seed = identity.seed(self._plan.seed, "mini-batches", step, epoch)
                order = np.random.default_rng(seed).permutation(len(samples))
            for indices in np.array_split(order, min(algorithm.mini_batches, len(samples))):
                parts.append(self._part([samples[int(index)] for index in indices]))
        return parts

    def _part(self, rows: Sequence[TrainSample]) -> _Part:
        algorithm = self._algorithm
        masks = [np.asarray(row.loss_mask) for row in rows]
        norm = None
        if algorithm.aggregation == "seq_mean_token_sum_norm":
            norm = algorithm.aggregation_tokens or self._plan.sampling.max_tokens
        made = aggregate(algorithm.aggregation, masks, norm)
        if made.weights is not None:
            rows = [
                replace(row, weights=np.full(len(row.token_ids), weight, dtype=np.float32))
                for row, weight in zip(rows, made.weights, strict=True)
            ]
        return _Part(TrainSamples(rows), float(made.denominator))
