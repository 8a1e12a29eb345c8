"""The commands themselves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.cli import accounts, certificates, environments, jobs, logs, serving
from opentinker.connection import stack
from opentinker.connection.cluster import Cluster
from opentinker.connection.notices import notices
from opentinker.connection.opening import connect

app = typer.Typer(
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command()(serving.serve)
app.command()(serving.chat)
app.add_typer(serving.deployments_app, name="deployments")
app.add_typer(accounts.users_app, name="users")
app.add_typer(accounts.projects_app, name="projects")
app.add_typer(accounts.keys_app, name="keys")
app.command()(accounts.audit)
app.command()(accounts.usage)
app.command()(accounts.whoami)
app.add_typer(jobs.jobs_app, name="jobs")
app.command()(jobs.queue)
app.command()(jobs.servers)
app.command()(jobs.attach)
app.command()(logs.logs)
app.add_typer(environments.env_app, name="env")
app.command()(certificates.certs)

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
def export(
    name: Annotated[
        str, typer.Argument(help="policies/P/versions/N or policies/P/checkpoints/C, whatever made it.")
    ],
    directory: Annotated[Path, typer.Argument(help="A directory that is not there yet.")],
    state_dir: StateDir = None,
    address: Annotated[str | None, typer.Option(help="host:port of another cluster's scheduler.")] = None,
    key: Annotated[str | None, typer.Option(envvar="OPENTINKER_API_KEY", help="Its API key.")] = None,
) -> None:
    """Write weights into a directory that PEFT, transformers and vLLM load."""
    where = None if address else stack.resolve(state_dir)
    with connect(address, key=key, state_dir=where) as cluster:
        path = cluster.export(name, directory).result()
    names = ", ".join(sorted(file.name for file in path.iterdir()))
    typer.echo(f"{name} is in {path}: {names}")


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


@app.command()
def sft(
    data: Annotated[str, typer.Argument(help=".jsonl or .parquet file, or directory of a saved data set.")],
    model: Annotated[str, typer.Option(help="Model id, or a directory on the server.")],
    evaluation: Annotated[str | None, typer.Option(help="Held-out rows, as DATA.")] = None,
    evaluation_every: Annotated[int | None, typer.Option(min=1, help="Steps between measurements.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data (default 1).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows a step (default 16).")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a step, instead of rows.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps until the peak.")] = 0,
    decay: Annotated[str, typer.Option(help="none, linear or cosine.")] = "none",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 16,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False,
    train_on: Annotated[str, typer.Option(help="all assistant turns, or the last.")] = "all",
    rewritten_history: Annotated[
        str, typer.Option(help="refuse or split, where the template rewrites earlier turns.")
    ] = "refuse",
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Longest row.")] = None,
    too_long: Annotated[str, typer.Option(help="refuse longer rows, or drop and count them.")] = "refuse",
    ignore: Annotated[list[str] | None, typer.Option(help="Column to ignore; may be repeated.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps between checkpoints.")] = None,
    from_checkpoint: Annotated[str, typer.Option(help="Checkpoint whose weights to start from.")] = "",
    resume: Annotated[str, typer.Option(help="Run to go on with, runs/...")] = "",
    seed: Annotated[int, typer.Option(help="Seed of order and adapter.")] = 0,
    name: Annotated[str, typer.Option(help="What the run is called.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where metrics are saved (default: runs/RUN).")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the losses into loss.png.")] = False,
    state_dir: StateDir = None,
    address: Annotated[str | None, typer.Option(help="host:port of another cluster's scheduler.")] = None,
    key: Annotated[str | None, typer.Option(envvar="OPENTINKER_API_KEY", help="Its API key.")] = None,
) -> None:
    """Train a model to say what the assistant says in a data set."""
    import opentinker as ot
    from opentinker.supervised.result import plotter

    if plot:
        plotter()
    tuning: Any = ot.Full() if full else ot.LoRA(rank=rank)
    with connect(address, key=key, state_dir=None if address else state_dir):
        result = ot.sft(
            data,
            model,
            tuning=tuning,
            evaluation=evaluation,
            evaluation_every=evaluation_every,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            warmup=warmup,
            decay=decay,  # type: ignore[arg-type]  # words are checked, and refused with what is allowed
            train_on=train_on,  # type: ignore[arg-type]
            rewritten_history=rewritten_history,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            too_long=too_long,  # type: ignore[arg-type]
            ignore_columns=ignore or (),
            checkpoint_every=checkpoint_every,
            from_checkpoint=from_checkpoint,
            resume=resume,
            seed=seed,
            name=name,
            run_dir=out,
            progress=True,
        )
        typer.echo(
            f"{result.run}: {result.steps} steps, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
        )
        for step, found in result.evaluations:
            typer.echo(f"  step {step}: {found.summary}")
        if dropped := int(result.data["data/dropped_too_long"]):
            typer.echo(f"  {dropped} rows were too long and left out")
        typer.echo(f"  published {result.policy.name} version {result.version}")
        typer.echo(f"  metrics in {result.run_dir}")
        if plot:
            typer.echo(f"  losses drawn in {result.plot(result.run_dir / 'loss.png')}")


def _show(cluster: Cluster) -> None:
    info = cluster.info().result()
    typer.echo(
        f"cluster {info.cluster} at {cluster.address}, version {info.version}: "
        f"{info.running_servers} of {info.max_servers} servers"
    )
    jobs.show_servers(cluster.servers().result())
    jobs.show_jobs(cluster.jobs(page_size=20).result())
