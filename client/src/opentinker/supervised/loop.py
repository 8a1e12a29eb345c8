"""The loop behind `sft()`, to copy and change.

Written with what the package offers everybody (`create_policy`, `forward_backward`, `optim_step`, `forward`,
`save_checkpoint`, `publish`). What a step learns from depends on data, seed and its place in the line of rows
only (`batches`), so a run that is resumed from a checkpoint goes on as if nothing had been.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentinker import errors
from opentinker.connection.calls import answer
from opentinker.connection.cluster import Cluster
from opentinker.connection.jobs import Link, Role
from opentinker.connection.runs import RunRecord
from opentinker.loop.algorithms import Schedule
from opentinker.loop.progress import Column
from opentinker.loop.recorder import Recorder
from opentinker.sampling import identity
from opentinker.supervised.batches import Batch, Batches
from opentinker.supervised.encoding import Encoding, Examples, encode
from opentinker.supervised.held_out import HeldOut, Measurement
from opentinker.supervised.result import SftResult
from opentinker.supervised.settings import Plan
from opentinker.training.operations import Operation
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint, ForwardBackwardResult, StepResult
from opentinker.training.token_losses import CrossEntropy
from opentinkerapi.runtime.tracing import traced
from opentinkerapi.trainer.v1 import trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

IN_FLIGHT = 2
"""Steps that are under way at once: while the trainer computes one, the next is there already."""

COLUMNS = (
    Column("loss", "train/loss", ".4f"),
    Column("grad norm", "actor/grad_norm", ".3f"),
    Column("lr", "actor/lr", ".2e"),
    Column("epoch", "training/epoch", ".2f"),
    Column("tokens/s", "perf/throughput", ",.0f"),
    Column("s/step", "timing_s/step", ".1f"),
)

_Recorder = Recorder[HeldOut]


@traced("sft")
async def train(plan: Plan, cluster: Cluster) -> SftResult:
    """The loop. Runs on the client's event loop."""
    start = await _start(plan, cluster)
    opening = _Recorder.open(plan, cluster, kind="sft", steps=0, columns=COLUMNS, resume=start.run)
    async with await opening as recorder:
        policy = await cluster.create_policy(
            plan.model,
            tuning=plan.tuning,
            seed=identity.seed(plan.seed, "adapter"),
            name=plan.name,
            from_checkpoint=start.checkpoint,
            trainer=plan.trainer,
            inference=plan.inference,
            job=plan.job,
            run=recorder.run,
            serve=plan.serve,
            supervised=True,
        )
        await recorder.working_on(policy.job.name)
        if plan.from_checkpoint:
            await policy.restore(plan.from_checkpoint, weights_only=True)
        course = await _course(plan, policy, start)
        recorder.expect(course.steps)
        for name, examples in (("data", course.examples), ("evaluation", course.held_out)):
            if examples is not None and examples.dropped:
                given = len(examples) + examples.dropped
                recorder.note(f"{name}: {examples.dropped} of {given} rows are too long and left out")
        await _steps(plan, policy, course, start, recorder)
        version = await policy.publish()
        if plan.serve:
            await policy.load(version.version)
        result = SftResult(
            policy,
            recorder.run,
            recorder.directory,
            policy.step,
            recorder.rows,
            recorder.evaluations,
            course.examples.metrics("data"),
            policy.checkpoint,
        )
        for callback in plan.callbacks:
            callback.on_end(result)
    return result


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a run begins: at its beginning, or at a checkpoint of run `of`."""

    of: str = ""
    checkpoint: str = ""
    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> tuple[str, int] | None:
        """The run to go on with, and its last step that counts."""
        return (self.of, self.step) if self.of else None

    @property
    def ordinal(self) -> int:
        """Place in the line of rows."""
        return int(self.state.get("next_ordinal", 0))


@dataclass(frozen=True, slots=True)
class _Course:
    """What there is to do."""

    examples: Examples
    held_out: Examples | None
    batches: Batches
    steps: int
    rate: Schedule
    identity: Mapping[str, Any]
    """What must be the same when the run is resumed."""


async def _start(plan: Plan, cluster: Cluster) -> _Start:
    if not plan.resume:
        return _Start()
    found = await RunRecord.loop_state(cluster.control, plan.resume)
    return _Start(plan.resume, found.checkpoint, found.step, json.loads(found.state))


async def _course(plan: Plan, policy: Policy, start: _Start) -> _Course:
    """Encode the rows and lay out the batches. Off the loop: it takes a while, and leases are renewed."""
    tokenizer = await policy.tokenizer()
    limit = await _longest(policy)
    if plan.max_tokens is not None and plan.max_tokens > limit:
        raise errors.invalid("max_tokens", f"{plan.max_tokens} is over the {limit} that the trainer takes")
    how = Encoding(plan.max_tokens or limit, plan.train_on, plan.rewritten_history, plan.too_long)
    examples = await asyncio.to_thread(encode, plan.rows, tokenizer, how, "data")
    held_out = None
    if plan.held_out:
        held_out = await asyncio.to_thread(encode, plan.held_out, tokenizer, how, "evaluation")
    lengths = [len(item.token_ids) for item in examples.items]
    batches = Batches(lengths, plan.batch, seed=plan.seed, shuffle=plan.shuffle, epochs=plan.epochs)
    steps = plan.steps if plan.steps is not None else batches.count()
    made = {**plan.lasting(), "data": examples.digest}
    before = start.state.get("made", made)
    if changed := sorted(name for name in {*made, *before} if made.get(name) != before.get(name)):
        raise errors.invalid("resume", f"{start.of} was made with another {', '.join(changed)}")
    if start.step >= steps:
        raise errors.invalid("resume", f"{start.of} has taken {start.step} steps of {steps} already")
    return _Course(examples, held_out, batches, steps, plan.schedule(steps), made)


async def _longest(policy: Policy) -> int:
    """The longest row that the trainer takes."""

    async def ask(link: Link) -> trainer_service_pb2.GetCapabilitiesResponse:
        request = trainer_service_pb2.GetCapabilitiesRequest()
        return await answer(TrainerServiceStub(link.channel).GetCapabilities(request))

    return int((await policy.job.through(Role.TRAINER, ask)).max_sequence_tokens)


@dataclass(slots=True)
class _Flight:
    """A step under way: its operations, in the order in which the trainer runs them."""

    step: int
    batch: Batch
    row: dict[str, float]
    gradient: Operation[ForwardBackwardResult]
    update: Operation[StepResult]
    measurement: Measurement | None
    checkpoint: Operation[Checkpoint] | None


async def _steps(plan: Plan, policy: Policy, course: _Course, start: _Start, recorder: _Recorder) -> None:
    if course.held_out is not None and not start.step:
        recorder.evaluated(0, await Measurement(policy, course.held_out.items).result())
    flights: deque[_Flight] = deque()
    ordinal = start.ordinal
    landed = time.monotonic()
    for step in range(start.step + 1, course.steps + 1):
        batch = course.batches.at(ordinal)
        assert batch is not None, "there is a batch for every step"
        flights.append(_launch(plan, policy, course, step, batch))
        ordinal = batch.next_ordinal
        if len(flights) == IN_FLIGHT:
            landed = await _land(plan, policy, course, flights.popleft(), landed, recorder)
    while flights:
        landed = await _land(plan, policy, course, flights.popleft(), landed, recorder)


def _launch(plan: Plan, policy: Policy, course: _Course, step: int, batch: Batch) -> _Flight:
    """Submit all that belongs to a step; the trainer keeps the order."""
    examples = [course.examples.items[index] for index in batch.indices]
    loss_tokens = sum(example.loss_tokens for example in examples)
    optimizer = plan.optimizer_at(course.rate, step)
    gradient = policy.forward_backward(
        [example.sample() for example in examples], CrossEntropy(), denominator=float(loss_tokens)
    )
    update = policy.optim_step(optimizer)
    last = step == course.steps
    due = last or (plan.evaluation_every is not None and step % plan.evaluation_every == 0)
    saves = plan.checkpoint_every is not None and (last or step % plan.checkpoint_every == 0)
    row = {
        "actor/lr": optimizer.lr,
        "training/epoch": course.batches.epoch(batch.next_ordinal),
        "tokens/loss": float(loss_tokens),
        "rows/total": float(len(examples)),
        "perf/total_num_tokens": float(sum(len(example.token_ids) for example in examples)),
    }
    if step == 1:
        row |= course.examples.metrics("data")
    return _Flight(
        step,
        batch,
        row,
        gradient,
        update,
        Measurement(policy, course.held_out.items) if due and course.held_out is not None else None,
        policy.save_checkpoint(f"step {step}") if saves else None,
    )


async def _land(
    plan: Plan, policy: Policy, course: _Course, flight: _Flight, before: float, recorder: _Recorder
) -> float:
    """Wait for a step and record it. Gives the time at which it ended."""
    learned, stepped = await flight.gradient, await flight.update
    now = time.monotonic()
    recorder.step(flight.step, flight.row | _measured(flight, learned, stepped, now - before))
    if flight.checkpoint is not None:
        state = {
            "next_ordinal": flight.batch.next_ordinal,
            "optimizer_step": stepped.step,
            "made": course.identity,
        }
        await recorder.saved(flight.step, await flight.checkpoint, state)
    if flight.measurement is not None:
        recorder.evaluated(flight.step, await flight.measurement.result())
    if stepped.consecutive_skips >= plan.stop_after_skipped:
        saved = policy.checkpoint.name if policy.checkpoint else "none was saved"
        raise errors.TrainingStopped(
            f"the gradient was not finite for {stepped.consecutive_skips} steps in a row; last checkpoint: "
            f"{saved}",
            reason=None,
        )
    return now


def _measured(
    flight: _Flight, learned: ForwardBackwardResult, stepped: StepResult, seconds: float
) -> dict[str, float]:
    metrics = {name: value.mean for name, value in {**learned.metrics, **stepped.metrics}.items()}
    engine = learned.engine_seconds + stepped.engine_seconds
    return metrics | {
        "train/loss": learned.components[CrossEntropy.component].sum / flight.row["tokens/loss"],
        "actor/grad_norm": stepped.grad_norm,
        "training/optimizer_step": float(stepped.step),
        "training/nonfinite_skips": float(stepped.consecutive_skips),
        "tokens/trained": float(learned.trained_tokens),
        "timing_s/step": seconds,
        "timing_s/engine_update_actor": engine,
        "perf/time_per_step": seconds,
        "perf/throughput": flight.row["perf/total_num_tokens"] / seconds if seconds else 0.0,
    }
