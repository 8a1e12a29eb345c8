"""`fit()`: reinforcement learning of a policy in an environment, in one call.

Written with what the package offers everybody (`create_policy`, `rollouts`, `train_samples`, `forward`,
`forward_backward`, `optim_step`, `publish`, `save_checkpoint`, `evaluate`): `train` below is the loop to
copy and change, `opentinker.loop.learner` what it does with a batch.

Whatever dies on the way (trainer, inference server, environment worker, scheduler) is waited for; seeds and
request ids depend on the run and the step only, so on a deterministic engine the run ends with the same
weights.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opentinker import errors
from opentinker.connection.cluster import Cluster
from opentinker.connection.opening import active_cluster
from opentinker.environments.base import check_class
from opentinker.environments.sources import EnvironmentSpec
from opentinker.loop import metrics as measure
from opentinker.loop.algorithms import GRPO, Algorithm, Schedule
from opentinker.loop.evaluation import EvaluationResult, play_held_out
from opentinker.loop.learner import Learner
from opentinker.loop.loggers import check_callbacks, check_loggers
from opentinker.loop.recorder import Recorder
from opentinker.loop.settings import LEARNING_RATE, Evaluation, Plan, refuse_later
from opentinker.rollout.agent_loop import Limits
from opentinker.rollout.rollouts import TRAIN, Rollouts
from opentinker.rollout.trajectory import Batch
from opentinker.sampling import identity
from opentinker.sampling.params import SamplingParams
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint
from opentinker.training.tuning import AdamW, LoRA, ServerOptions, Tuning

CLIP_NORM = 1.0

_Recorder = Recorder[EvaluationResult]


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to. `policy` can be used while its cluster is open; its versions and checkpoints
    stay.
    """

    policy: Policy
    run: str
    run_dir: Path
    steps: int
    """Optimizer steps taken."""
    metrics: list[dict[str, float]] = field(repr=False)
    """One row a step."""
    evaluations: list[tuple[int, EvaluationResult]] = field(repr=False)
    """(step, result), step 0 before training."""
    checkpoint: Checkpoint | None = None
    """The last one saved."""
    stopped: str = ""
    """Why it ended before its last step, if it did."""
    critic: Policy | None = None
    """The critic's own policy, where the algorithm has one."""

    @property
    def version(self) -> int:
        """The newest published version."""
        return self.policy.version

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["critic/score/mean"] for row in self.metrics if "critic/score/mean" in row]


def fit(
    env: EnvironmentSpec,
    model: str,
    *,
    tuning: Tuning | None = None,
    from_checkpoint: Checkpoint | str = "",
    algorithm: Algorithm | None = None,
    groups_per_step: int = 8,
    steps: int = 40,
    learning_rate: Schedule = LEARNING_RATE,
    optimizer: AdamW | None = None,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
    evaluation: Evaluation | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    env_options: Mapping[str, Any] | None = None,
    split: str = TRAIN,
    shuffle: bool = True,
    name: str = "",
    run_dir: str | Path | None = None,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    trainer: ServerOptions | None = None,
    inference: ServerOptions | None = None,
    stop_after_constant: int = 10,
    stop_after_skipped: int = 5,
    logprob_check: float | bool = True,
    progress: bool | None = None,
    cluster: Cluster | None = None,
    **later: Any,
) -> FitResult:
    """Train a policy over `model` in `env` and block until it is done.

    Each step plays `groups_per_step` groups of `algorithm.group_size` episodes of one task, takes one
    optimizer step on them (more where the algorithm has epochs or mini-batches) and publishes the weights.
    `tuning` says what is trained: LoRA(...) (default) or Full(...); `from_checkpoint` gives it the weights of
    a checkpoint of the same tuning to start from (of `sft()`, say). `learning_rate` is a number or a function
    of the step (1, 2, 3 ...); the rest of the optimizer is `optimizer` (default: gradient norm clipped at 1).
    The loss is divided by the loss tokens of the whole batch, rows that cannot contribute included, unless
    the algorithm aggregates in another way. `env` is an environment class, played in this process, or the
    name of a hosted one. Without a `cluster` the innermost open one is used, or an embedded stack is started.

    Before its first update the run compares trainer and sampler on tokens of its own first batch and refuses
    to train with LogprobMismatch where their mean logprobs differ by more than 1e-3 (both float32), otherwise
    0.08. `logprob_check` is another bound, or False.

    A batch in which no group's rewards differ takes no step; after `stop_after_constant` of them in a row
    the run stops (`FitResult.stopped` says so). TrainingStopped after `stop_after_skipped` steps in a row
    whose gradient was not finite, naming the last good checkpoint. Options of later versions are refused by
    name with UnsupportedOption.
    """
    plan = _plan(locals())
    chosen = cluster if cluster is not None else active_cluster()
    return chosen.portal.run(train(plan, chosen))


async def fit_async(
    env: EnvironmentSpec, model: str, *, cluster: Cluster | None = None, **options: Any
) -> FitResult:
    """`fit()` for coroutines of any event loop; takes the same options."""
    plan = _plan({**_DEFAULTS, "env": env, "model": model, **_known(options), "later": _unknown(options)})
    chosen = cluster if cluster is not None else await asyncio.to_thread(active_cluster)
    return await chosen.portal.bridge(train(plan, chosen))


async def train(plan: Plan, cluster: Cluster) -> FitResult:
    """The loop. Runs on the client's event loop."""
    async with await _Recorder.open(
        plan, cluster, steps=plan.steps, reply_limit=plan.sampling.max_tokens
    ) as recorder:
        policy = await cluster.create_policy(
            plan.model,
            tuning=plan.policy_tuning,
            seed=identity.seed(plan.seed, "adapter"),
            name=plan.name,
            trainer=plan.trainer,
            inference=plan.inference,
            run=recorder.run,
        )
        await recorder.working_on(policy.job.name)
        critic = None
        if plan.critic_tuning is not None:
            critic = await cluster.create_policy(
                plan.model,
                tuning=plan.critic_tuning,
                seed=identity.seed(plan.seed, "critic"),
                name=f"{plan.name} critic".strip(),
                beside=policy,
            )
        await _start(plan, policy, critic)
        begun = policy.step
        batches = Rollouts(
            policy,
            plan.env,
            groups=plan.groups_per_step,
            group_size=plan.algorithm.group_size,
            params=plan.sampling,
            limits=plan.limits,
            seed=plan.seed,
            options=plan.env_options,
            split=plan.split,
            shuffle=plan.shuffle,
            scope=recorder.run,
        )
        try:
            stopped = await _steps(plan, Learner(plan, policy, critic), policy, batches, recorder)
        finally:
            await batches.close()
        result = FitResult(
            policy,
            recorder.run,
            recorder.directory,
            policy.step - begun,
            recorder.rows,
            recorder.evaluations,
            policy.checkpoint,
            stopped,
            critic,
        )
        for callback in plan.callbacks:
            callback.on_end(result)
    return result


async def _start(plan: Plan, policy: Policy, critic: Policy | None) -> None:
    """Give the policy the weights that it starts from, and make them its next version. A critic with the same
    tuning starts from them too, its head new: it then knows what the policy knows.
    """
    if not plan.from_checkpoint:
        return
    await policy.restore(plan.from_checkpoint, weights_only=True)
    if critic is not None and plan.critic_tuning == replace(plan.tuning, value_head=True):
        await critic.restore(plan.from_checkpoint, weights_only=True)
    version = await policy.publish()
    await policy.load(version.version)


async def _steps(plan: Plan, learner: Learner, policy: Policy, batches: Rollouts, recorder: _Recorder) -> str:
    """All steps, with what is due between them. Returns why it stopped early, if it did."""
    await _evaluate(plan, policy, recorder, 0)
    constant = 0
    for step in range(1, plan.steps + 1):
        started = time.monotonic()
        batch = await anext(batches)
        row = measure.of_batch(batch, policy.version)
        learned = await learner.learn(batch, step)
        row |= learned.row | {"training/skipped": float(not learned.updated)}
        constant = constant + 1 if learned.inert else 0
        if not learned.updated:
            recorder.note(f"step {step} skipped: {_why_inert(batch)}")
        recorder.step(step, _timed(row, time.monotonic() - started))
        due = plan.checkpoint_every is not None and step % plan.checkpoint_every == 0
        # A step whose gradient was not finite changed nothing, and may be the first of many: the last good
        # state is the one before.
        if due and not row.get("training/nonfinite_skips"):
            await _save(learner, policy, batches, recorder, step)
        stop = await _stop(plan, learner, policy, batches, recorder, step, row, constant)
        last = step == plan.steps or bool(stop)
        if last or (plan.evaluation and plan.evaluation.every and step % plan.evaluation.every == 0):
            await _evaluate(plan, policy, recorder, step)
        if stop:
            recorder.note(stop)
            return stop
    return ""


async def _evaluate(plan: Plan, policy: Policy, recorder: _Recorder, step: int) -> None:
    if plan.evaluation is None:
        return
    result = await play_held_out(
        policy,
        plan.env,
        samples=plan.evaluation.samples,
        tasks=plan.evaluation.tasks,
        split=plan.evaluation.split,
        params=plan.evaluation.sampling or plan.sampling,
        limits=plan.limits,
        seed=plan.seed,
        options=plan.env_options,
        version=policy.version,
        scope=f"{recorder.run}/evaluation/{step}",
    )
    recorder.evaluated(step, result)


async def _save(learner: Learner, policy: Policy, batches: Rollouts, recorder: _Recorder, step: int) -> None:
    saved = await learner.save(f"step {step}")
    state = {"next_ordinal": batches.next_ordinal, "version": policy.version, "optimizer_step": policy.step}
    await recorder.saved(step, saved, state | learner.state())


async def _stop(
    plan: Plan,
    learner: Learner,
    policy: Policy,
    batches: Rollouts,
    recorder: _Recorder,
    step: int,
    row: Mapping[str, float],
    constant: int,
) -> str:
    """Why to end now, or nothing. TrainingStopped where what is left is of no use."""
    if constant >= plan.stop_after_constant:
        return f"stopped: no group had rewards that differ, {constant} steps in a row"
    if row.get("training/nonfinite_skips", 0.0) >= plan.stop_after_skipped:
        if policy.checkpoint is None:
            # Skipped steps changed nothing: this is the state before the first of them.
            await _save(learner, policy, batches, recorder, step)
        assert policy.checkpoint is not None
        raise errors.TrainingStopped(
            f"the gradient was not finite for {plan.stop_after_skipped} steps in a row; "
            f"last good checkpoint: {policy.checkpoint.name} (optimizer step {policy.checkpoint.step})",
            reason=None,
            metadata={"checkpoint": policy.checkpoint.name},
        )
    return ""


def _why_inert(batch: Batch) -> str:
    rewards = batch.rewards
    if not rewards:
        reasons = sorted({trajectory.error or trajectory.end_reason.value for trajectory in batch})
        return f"no episode has a reward ({'; '.join(reasons[:3])})"
    low, high = min(rewards), max(rewards)
    spread = f"all are {low:g}" if low == high else f"between {low:g} and {high:g}, equal within each group"
    return f"the rewards of each group are equal ({spread}), so there is nothing to prefer"


def _timed(row: dict[str, float], seconds: float) -> dict[str, float]:
    engine = sum(value for name, value in row.items() if name.startswith("timing_s/engine_"))
    return row | {
        "timing_s/step": seconds,
        "timing_s/engine": engine,
        "timing_s/outside_engine": max(0.0, seconds - engine),
        "perf/time_per_step": seconds,
        "perf/throughput": row.get("perf/total_num_tokens", 0.0) / seconds if seconds else 0.0,
    }


_DEFAULTS: dict[str, Any] = {
    key: value for key, value in (fit.__kwdefaults__ or {}).items() if key != "cluster"
}


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _DEFAULTS}


def _unknown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _DEFAULTS}


def _plan(given: Mapping[str, Any]) -> Plan:
    """Check everything that can be checked before anything is started."""
    refuse_later(given["later"])
    if not isinstance(given["env"], str):
        check_class(given["env"])
    check_loggers(given["loggers"])
    check_callbacks(given["callbacks"])
    options = {name: value for name, value in given.items() if name not in ("later", "cluster")}
    defaults = {
        "tuning": LoRA(),
        "algorithm": GRPO(),
        "optimizer": AdamW(clip_norm=CLIP_NORM),
        "sampling": SamplingParams(),
        "limits": Limits(),
        "env_options": {},
    }
    options |= {name: value for name, value in defaults.items() if options[name] is None}
    start = options["from_checkpoint"]
    options["from_checkpoint"] = start.name if isinstance(start, Checkpoint) else start
    options["run_dir"] = Path(options["run_dir"]) if options["run_dir"] is not None else None
    return Plan(**options)
