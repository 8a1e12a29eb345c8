"""Commands around jobs and servers: jobs, queue, servers, attach."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from opentinker import errors
from opentinker.cli.serving import Address, Key, StateDir, running_cluster
from opentinker.cli.tables import show
from opentinker.connection.cluster import Cluster
from opentinker.connection.project_jobs import LOOK_EVERY_S, ProjectJobs, RunMetrics
from opentinkerapi.scheduler.v1 import job_pb2

JobName = Annotated[str, typer.Argument(help="jobs/JOB, as `opentinker jobs` shows it.")]

jobs_app = typer.Typer(help="Show jobs, and end, pause or resume one.", add_completion=False)

STATES = {
    name.removeprefix("JOB_STATE_").lower(): value
    for name, value in job_pb2.JobState.items()
    if value != job_pb2.JOB_STATE_UNSPECIFIED
}
_SHOWN = {
    "reward": "critic/score/mean",
    "loss": "train/loss",
    "held-out loss": "val/loss",
    "KL": "actor/ppo_kl",
    "grad norm": "actor/grad_norm",
    "s/step": "timing_s/step",
}
"""What is shown of a row, as far as it has it."""


@jobs_app.callback(invoke_without_command=True)
def list_jobs(
    context: typer.Context,
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many of the newest.")] = 50,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show the newest jobs of the project."""
    context.obj = (state_dir, address, key)
    if context.invoked_subcommand is not None:
        return
    wanted = [_state(each) for each in state or ()]
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(ProjectJobs(cluster.control).jobs(wanted, limit))
    show_jobs(found)


@jobs_app.command()
def cancel(context: typer.Context, job: JobName) -> None:
    """End a job; what it saved stays."""
    _change(context, job, ProjectJobs.cancel)


@jobs_app.command()
def pause(context: typer.Context, job: JobName) -> None:
    """Save what a job holds and give its slots to others, until it is resumed."""
    _change(context, job, ProjectJobs.pause)


@jobs_app.command()
def resume(context: typer.Context, job: JobName) -> None:
    """Queue a paused job again."""
    _change(context, job, ProjectJobs.resume)


def queue(state_dir: StateDir = None, address: Address = None, key: Key = None) -> None:
    """Show the jobs that wait, in order, and what each waits for."""
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(ProjectJobs(cluster.control).queue())
    rows = [
        (
            str(job.queue_position or ""),
            *_named(job)[:3],
            str(job.priority),
            _ago(job, "create_time"),
            _starts(job),
            takes(job.cost),
            job.state_reason,
        )
        for job in found
    ]
    titles = ("place", "job", "name", "kind", "priority", "made", "starts", "takes", "waits for")
    show(titles, rows, "nobody waits", sparse=("starts",))


def servers(
    ended: Annotated[bool, typer.Option("--all", help="Those that ended, too.")] = False,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show trainer and inference servers."""
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(ProjectJobs(cluster.control).servers(ended=ended))
    show_servers(found)


def attach(
    job: JobName,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Follow a job and the metrics of its run until it ends; Ctrl-C leaves it as it is.

    Ends with 0 if the job succeeded and 1 if it did not.
    """
    with running_cluster(state_dir, address, key) as cluster:
        try:
            last = cluster.wait(_follow(cluster, job))
        except KeyboardInterrupt:
            typer.echo(f"{job} goes on without you")
            return
    if last.state != job_pb2.JOB_STATE_SUCCEEDED:
        raise typer.Exit(code=1)


async def _follow(cluster: Cluster, name: str) -> job_pb2.Job:
    jobs = ProjectJobs(cluster.control)
    following: asyncio.Task[None] | None = None
    said, job, metrics = "", job_pb2.Job(), None
    try:
        async for job in jobs.watch(name):
            words = describe(job)
            if words != said:
                typer.echo(words)
                said = words
            if job.run and metrics is None:
                metrics = RunMetrics(cluster.control, job.run)
                following = asyncio.create_task(_tell_metrics(metrics))
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    if metrics is not None:
        _tell(await metrics.new())
    return job


async def _tell_metrics(metrics: RunMetrics) -> None:
    while True:
        _tell(await metrics.new())
        await asyncio.sleep(LOOK_EVERY_S)


def _tell(rows: Iterable[Any]) -> None:
    for row in rows:
        values = [f"{word} {row.values[name]:.4g}" for word, name in _SHOWN.items() if name in row.values]
        typer.echo(f"  step {row.step}: {', '.join(values) or f'{len(row.values)} metrics'}")


def describe(job: job_pb2.Job) -> str:
    """Where a job stands, in a line."""
    state = word(job_pb2.JobState, job.state)
    place = f", place {job.queue_position}" if job.queue_position else ""
    why = job.error.message or job.state_reason or job.outcome_message
    return f"{job.name} {job.display_name}".strip() + f": {state}{place}" + (f": {why}" if why else "")


def show_jobs(found: Iterable[job_pb2.Job]) -> None:
    """A table of jobs."""
    rows = [
        (
            *_named(job),
            str(job.attempt),
            _ago(job, "create_time"),
            _starts(job),
            takes(job.cost),
            job.run,
            job.error.message or job.state_reason or job.outcome_message,
        )
        for job in found
    ]
    titles = ("job", "name", "kind", "state", "attempt", "made", "starts", "takes", "run", "why")
    show(titles, rows, "no jobs", sparse=("starts", "run", "why"))


def show_servers(found: Iterable[job_pb2.Server]) -> None:
    """A table of servers."""
    rows = [
        (
            server.name,
            word(job_pb2.SlotRole, server.role),
            word(job_pb2.ServerState, server.state),
            server.base_model,
            server.options.engine,
            f"{server.slots_used}/{server.slots_total}",
            server.address,
            str(server.pid or ""),
            ", ".join(server.devices),
        )
        for server in found
    ]
    titles = ("server", "role", "state", "model", "engine", "slots", "address", "pid", "gpus")
    show(titles, rows, "no servers")


def word(enum: Any, value: int) -> str:
    """The value's name without the enum's."""
    name: str = enum.Name(value)
    prefixes = ("SLOT_ROLE_", "SERVER_STATE_", "JOB_KIND_", "JOB_STATE_")
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name).lower()


def _named(job: job_pb2.Job) -> tuple[str, str, str, str]:
    return (
        job.name,
        job.display_name,
        word(job_pb2.JobKind, job.kind),
        word(job_pb2.JobState, job.state),
    )


def _change(
    context: typer.Context, job: str, change: Callable[[ProjectJobs, str], Awaitable[job_pb2.Job]]
) -> None:
    with running_cluster(*context.obj) as cluster:
        typer.echo(describe(cluster.wait(change(ProjectJobs(cluster.control), job))))


def _state(text: str) -> "job_pb2.JobState.ValueType":
    if text not in STATES:
        raise errors.invalid("state", f"{text!r} is none of {', '.join(STATES)}")
    return STATES[text]


def _ago(job: job_pb2.Job, field: str) -> str:
    if not job.HasField(field):  # type: ignore[arg-type]  # names of fields, not known by their literals
        return ""
    time: datetime = getattr(job, field).ToDatetime(UTC)
    return f"{_long((datetime.now(UTC) - time).total_seconds())} ago"


def _starts(job: job_pb2.Job) -> str:
    """In how long a waiting job is expected to start, where that is known."""
    if not job.HasField("estimated_start_time"):
        return ""
    left = job.estimated_start_time.ToDatetime(UTC) - datetime.now(UTC)
    return f"in about {_long(left.total_seconds())}" if left.total_seconds() >= 1 else "soon"


def _long(seconds: float) -> str:
    whole = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def takes(cost: job_pb2.JobCost) -> str:
    """What a job takes from others, and what that costs where the cluster has prices."""
    words = [f"{cost.slots:.4g} {'slot' if cost.slots == 1 else 'slots'}"]
    if cost.gpus:
        words.append(f"{cost.gpus:.4g} {'GPU' if cost.gpus == 1 else 'GPUs'}")
    if cost.HasField("max_slot_hours"):
        hours = cost.max_gpu_hours or cost.max_slot_hours
        words.append(f"at most {hours:,.2f} {'GPU' if cost.max_gpu_hours else 'slot'} hours")
    if cost.HasField("hourly_price"):
        at_most = f", at most {cost.max_price:,.2f}" if cost.HasField("max_price") else ""
        words.append(f"price {cost.hourly_price:,.2f} an hour{at_most}")
    return ", ".join(words)
