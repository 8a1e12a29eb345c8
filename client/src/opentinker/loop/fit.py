"""`fit()`: reinforcement learning of a policy in an environment, in one call.

Written with what the package offers everybody (`create_policy`, `rollouts`, `train_samples`,
`forward_backward`, `optim_step`, `publish`, `save_checkpoint`, `evaluate`): `train` below is the loop to
copy and change.

Whatever dies on the way (trainer, inference server, environment worker, scheduler) is waited for; seeds and
request ids depend on the run and the step only, so on a deterministic engine the run ends with the same
weights.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker import errors
from opentinker.connection.cluster import Cluster, active_cluster
from opentinker.environments.base import check_class
from opentinker.environments.sources import EnvironmentSpec
from opentinker.loop import metrics as measure
from opentinker.loop.evaluation import EvaluationResult, play_held_out
from opentinker.loop.loggers import check_callbacks, check_loggers
from opentinker.loop.recorder import Recorder
from opentinker.loop.settings import GRPO, LEARNING_RATE, Evaluation, Plan, Schedule, refuse_later
from opentinker.rollout.agent_loop import Limits
from opentinker.rollout.rollouts import TRAIN, Rollouts
from opentinker.rollout.trajectory import Batch
from opentinker.sampling import identity
from opentinker.sampling.params import SamplingParams
from opentinker.training.episodes import train_samples
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint
from opentinker.training.samples import TrainSamples
from opentinker.training.tuning import AdamW, LoRA, ServerOptions

CLIP_NORM = 1.0


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
    tuning: LoRA | None = None,
    algorithm: GRPO | None = None,
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
    progress: bool | None = None,
    cluster: Cluster | None = None,
    **later: Any,
) -> FitResult:
    """Train a LoRA policy over `model` in `env` and block until it is done.

    Each step plays `groups_per_step` groups of `algorithm.group_size` episodes of one task, takes one
    optimizer step on them and publishes the weights. `learning_rate` is a number or a function of the step
    (1, 2, 3 ...); the rest of the optimizer is `optimizer` (default: gradient norm clipped at 1). The loss
    is divided by the loss tokens of the whole batch, rows that cannot contribute included. `env` is an
    environment class, played in this process, or the name of a hosted one. Without a `cluster` the
    innermost open one is used, or an embedded stack is started.

    A batch in which no group's rewards differ takes no step; after `stop_after_constant` of them in a row
    the run stops (`FitResult.stopped` says so). TrainingStopped after `stop_after_skipped` steps in a row
    whose gradient was not finite. Options of later versions are refused by name with UnsupportedOption.
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
    async with await Recorder.open(plan, cluster) as recorder:
        policy = await cluster.create_policy(
            plan.model,
            tuning=plan.tuning,
            seed=identity.seed(plan.seed, "adapter"),
            name=plan.name,
            trainer=plan.trainer,
            inference=plan.inference,
            run=recorder.run,
        )
        await recorder.working_on(policy.job.name)
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
            stopped = await _steps(plan, policy, batches, recorder)
        finally:
            await batches.close()
        result = FitResult(
            policy,
            recorder.run,
            recorder.directory,
            policy.step,
            recorder.rows,
            recorder.evaluations,
            policy.checkpoint,
            stopped,
        )
        for callback in plan.callbacks:
            callback.on_end(result)
    return result


async def _steps(plan: Plan, policy: Policy, batches: Rollouts, recorder: Recorder) -> str:
    """All steps, with what is due between them. Returns why it stopped early, if it did."""
    await _evaluate(plan, policy, recorder, 0)
    constant = 0
    for step in range(1, plan.steps + 1):
        started = time.monotonic()
        batch = await anext(batches)
        samples = train_samples(batch, plan.algorithm.advantage, zero_variance=plan.algorithm.zero_variance)
        row = measure.of_batch(batch, policy.version) | samples.metrics
        if samples.inert:
            constant += 1
            recorder.note(f"step {step} skipped: {_why_inert(batch)}")
            row |= {"training/skipped": 1.0}
        else:
            constant = 0
            row |= await _update(plan, policy, samples, step) | {"training/skipped": 0.0}
        recorder.step(step, _timed(row, time.monotonic() - started))
        if plan.checkpoint_every is not None and step % plan.checkpoint_every == 0:
            await _save(policy, batches, recorder, step)
        stop = _stop(plan, policy, row, constant)
        last = step == plan.steps or bool(stop)
        if last or (plan.evaluation and plan.evaluation.every and step % plan.evaluation.every == 0):
            await _evaluate(plan, policy, recorder, step)
        if stop:
            recorder.note(stop)
            return stop
    return ""


async def _update(plan: Plan, policy: Policy, samples: TrainSamples, step: int) -> dict[str, float]:
    """One optimizer step and the new version: three operations under way at once, in order."""
    started = time.monotonic()
    optimizer = plan.optimizer_at(step)
    gradient = policy.forward_backward(
        samples, plan.algorithm.loss, denominator=float(samples.loss_tokens), skip_inert=True
    )
    update = policy.optim_step(optimizer)
    publication = policy.publish()
    learned, stepped = await gradient, await update
    updated = time.monotonic()
    version = await publication
    loading = await policy.load(version.version)
    return measure.of_update(samples, learned, stepped, optimizer.lr) | {
        "timing_s/update_actor": updated - started,
        "timing_s/update_weights": time.monotonic() - updated,
        "timing_s/engine_update_actor": learned.engine_seconds + stepped.engine_seconds,
        "timing_s/engine_update_weights": version.engine_seconds + loading,
    }


async def _evaluate(plan: Plan, policy: Policy, recorder: Recorder, step: int) -> None:
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


async def _save(policy: Policy, batches: Rollouts, recorder: Recorder, step: int) -> None:
    checkpoint = await policy.save_checkpoint(f"step {step}")
    state = {"next_ordinal": batches.next_ordinal, "version": policy.version, "optimizer_step": policy.step}
    await recorder.saved(step, checkpoint, state)


def _stop(plan: Plan, policy: Policy, row: Mapping[str, float], constant: int) -> str:
    """Why to end now, or nothing. TrainingStopped where what is left is of no use."""
    if constant >= plan.stop_after_constant:
        return f"stopped: no group had rewards that differ, {constant} steps in a row"
    if row.get("training/nonfinite_skips", 0.0) >= plan.stop_after_skipped:
        saved = policy.checkpoint.name if policy.checkpoint else "none was saved"
        raise errors.TrainingStopped(
            f"the gradient was not finite for {plan.stop_after_skipped} steps in a row; "
            f"last checkpoint: {saved}",
            reason=None,
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
    options["run_dir"] = Path(options["run_dir"]) if options["run_dir"] is not None else None
    return Plan(**options)
