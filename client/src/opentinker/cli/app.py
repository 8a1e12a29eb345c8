"""The commands themselves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.connection import stack
from opentinker.connection.cluster import Cluster, connect
from opentinker.connection.notices import notices
from opentinkerapi.scheduler.v1 import job_pb2

app = typer.Typer(
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

StateDir = Annotated[
    Path | None,
    typer.Option(help="State directory of the embedded stack (default: the user's data directory)."),
]


@app.command()
def up(state_dir: StateDir = None) -> None:
    """Start the embedded stack on this machine; it stays until `down`."""
    directory = stack.resolve(state_dir)
    running = stack.holder(directory) is not None
    with notices(None) as say:
        if running:
            info = stack.attach(directory, say).info
        else:
            child = stack.launch(directory, {}, owner_fd=None)
            info = stack.wait_until_ready(directory, child, say) or stack.attach(directory, say).info
    typer.echo(f"{'the stack was up already' if running else 'the stack is up'} under {directory}")
    typer.echo(f"  scheduler  {info['scheduler']}")
    typer.echo(f"  env_host   {info['env_host']}")
    typer.echo(f"  key        {info['bootstrap_key_file']}")
    where = "" if state_dir is None else f'state_dir="{directory}"'
    typer.echo(f"use it with opentinker.connect({where}); stop it with: opentinker down")


@app.command()
def down(state_dir: StateDir = None) -> None:
    """Stop the embedded stack and everything it started."""
    directory = stack.resolve(state_dir)
    if stack.stop(directory):
        typer.echo(f"the stack under {directory} has stopped")
    else:
        typer.echo(f"no stack runs under {directory}")


@app.command()
def status(
    state_dir: StateDir = None,
    address: Annotated[str | None, typer.Option(help="host:port of another cluster's scheduler.")] = None,
    key: Annotated[str | None, typer.Option(envvar="OPENTINKER_API_KEY", help="Its API key.")] = None,
) -> None:
    """Show what runs: servers and jobs."""
    if address is None and stack.holder(stack.resolve(state_dir)) is None:
        typer.echo(f"no stack runs under {stack.resolve(state_dir)}; start one with: opentinker up")
        raise typer.Exit(code=3)
    with connect(address, key=key, state_dir=None if address else stack.resolve(state_dir)) as cluster:
        _show(cluster)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the whole run.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 45,
    out: Annotated[Path, typer.Option(help="Where metrics, curve and result are saved.")] = Path("runs/demo"),
    engine: Annotated[
        str | None, typer.Option(help="Inference engine: vllm or transformers (default: the cluster's).")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Train SmolLM2-135M-Instruct to add and subtract, on this machine, in minutes."""
    from opentinker.demo import run_demo

    run_demo(seed=seed, steps=steps, out=out, engine=engine, state_dir=state_dir)


def _show(cluster: Cluster) -> None:
    from rich.console import Console
    from rich.table import Table

    info = cluster.info().result()
    console = Console()
    typer.echo(
        f"cluster {info.cluster} at {cluster.address}, version {info.version}: "
        f"{info.running_servers} of {info.max_servers} servers"
    )
    servers = Table("server", "role", "state", "model", "engine", "slots", "address", "pid", title="servers")
    for server in cluster.servers().result():
        servers.add_row(
            server.name,
            _word(job_pb2.SlotRole, server.role),
            _word(job_pb2.ServerState, server.state),
            server.base_model,
            server.options.engine,
            f"{server.slots_used}/{server.slots_total}",
            server.address,
            str(server.pid or ""),
        )
    jobs = Table("job", "kind", "state", "waits for", title="jobs")
    for job in cluster.jobs(page_size=20).result():
        jobs.add_row(
            f"{job.name} {job.display_name}".strip(),
            _word(job_pb2.JobKind, job.kind),
            _word(job_pb2.JobState, job.state),
            job.state_reason,
        )
    for table in (servers, jobs):
        if table.row_count:
            console.print(table)
        else:
            console.print(f"no {table.title}")


def _word(enum: Any, value: int) -> str:
    """The value's name without the enum's."""
    name: str = enum.Name(value)
    prefixes = ("SLOT_ROLE_", "SERVER_STATE_", "JOB_KIND_", "JOB_STATE_")
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name).lower()
