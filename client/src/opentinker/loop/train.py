"""The loop of `fit()`: the one to copy and change. `loop.learner` is what it does with a batch.

Whatever dies on the way (trainer, inference server, environment worker, scheduler) is waited for; seeds and
request ids depend on the run and the step only, so on a deterministic engine the run ends with the same
weights.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from opentinker import errors
from opentinker.connection.cluster import Cluster
from opentinker.loop import metrics as measure
from opentinker.loop.evaluation import EvaluationResult
from opentinker.loop.held_out import play_held_out
from opentinker.loop.recorder import Recorder
from opentinker.loop.result import FitResult
from opentinker.loop.settings import Plan
from opentinker.loop.teams import Team
from opentinker.rollout.rollouts import Rollouts
from opentinker.rollout.trajectory import Batch
from opentinkerapi.runtime.tracing import traced

_Recorder = Recorder[EvaluationResult]


@traced("fit")
async def train(plan: Plan, cluster: Cluster) -> FitResult:
    """The loop. Runs on the client's event loop."""
    async with await _Recorder.open(
        plan, cluster, steps=plan.steps, reply_limit=plan.sampling.max_tokens
    ) as recorder:
        team = await Team.create(plan, cluster, recorder.run, recorder.working_on)
        policy = team.first.policy
        begun = team.step
        batches = Rollouts(
            policy,
            plan.env,
            groups=plan.groups_per_step,
            group_size=plan.algorithm.group_size,
            params=plan.rollout_sampling,
            limits=plan.limits,
            seed=plan.seed,
            options=plan.env_options,
            split=plan.split,
            shuffle=plan.shuffle,
            scope=recorder.run,
            agents=plan.agents,
            policies=team.policies,
            stragglers=plan.stragglers,
        )
        try:
            stopped = await _steps(plan, team, batches, recorder)
        finally:
            await batches.close()
        result = FitResult(
            policy,
            recorder.run,
            recorder.directory,
            team.step - begun,
            recorder.rows,
            recorder.evaluations,
            policy.checkpoint,
            stopped,
            team.first.critic,
            team.policies,
        )
        for callback in plan.callbacks:
            callback.on_end(result)
    return result


async def _steps(plan: Plan, team: Team, batches: Rollouts, recorder: _Recorder) -> str:
    """All steps, with what is due between them. Returns why it stopped early, if it did."""
    await _evaluate(plan, team, recorder, 0)
    constant = 0
    for step in range(1, plan.steps + 1):
        started = time.monotonic()
        batch = await anext(batches)
        row = measure.of_batch(batch, team.versions)
        learned = await team.learn(batch, step)
        row |= learned.row | {"training/skipped": float(not learned.updated)}
        constant = constant + 1 if learned.inert else 0
        if not learned.updated:
            recorder.note(f"step {step} skipped: {_why_inert(batch)}")
        recorder.step(step, _timed(row, time.monotonic() - started))
        due = plan.checkpoint_every is not None and step % plan.checkpoint_every == 0
        # A step whose gradient was not finite changed nothing, and may be the first of many: the last good
        # state is the one before.
        if due and not row.get("training/nonfinite_skips"):
            await _save(team, batches, recorder, step)
        stop = await _stop(plan, team, batches, recorder, step, row, constant)
        last = step == plan.steps or bool(stop)
        if last or (plan.evaluation and plan.evaluation.every and step % plan.evaluation.every == 0):
            await _evaluate(plan, team, recorder, step)
        if stop:
            recorder.note(stop)
            return stop
    return ""


async def _evaluate(plan: Plan, team: Team, recorder: _Recorder, step: int) -> None:
    if plan.evaluation is None:
        return
    policy = team.first.policy
    result = await play_held_out(
        policy,
        plan.env,
        samples=plan.evaluation.samples,
        tasks=plan.evaluation.tasks,
        split=plan.evaluation.split,
        params=plan.evaluation.sampling or replace(plan.rollout_sampling, return_support=False),
        limits=plan.limits,
        seed=plan.seed,
        options=plan.env_options,
        version=policy.version,
        scope=f"{recorder.run}/evaluation/{step}",
        agents=plan.agents if plan.evaluation.agents is None else plan.evaluation.agents,
        policies=team.policies,
    )
    recorder.evaluated(step, result)


async def _save(team: Team, batches: Rollouts, recorder: _Recorder, step: int) -> None:
    saved, learners = await team.save(step)
    policy = team.first.policy
    state = {"version": policy.version, "optimizer_step": policy.step}
    await recorder.saved(step, saved, state | batches.state() | learners)


async def _stop(
    plan: Plan,
    team: Team,
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
        policy = team.first.policy
        if policy.checkpoint is None:
            # Skipped steps changed nothing: this is the state before the first of them.
            await _save(team, batches, recorder, step)
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
