"""Commands around served models: serve, deployments, chat."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from opentinker import errors
from opentinker.connection import stack
from opentinker.connection.cluster import Cluster
from opentinker.connection.opening import connect
from opentinker.sampling.params import SamplingParams
from opentinker.serving.served import ServedModel

StateDir = Annotated[
    Path | None,
    typer.Option(help="State directory of the embedded stack (default: the user's data directory)."),
]
Address = Annotated[str | None, typer.Option(help="host:port of another cluster's scheduler.")]
Key = Annotated[str | None, typer.Option(envvar="OPENTINKER_API_KEY", help="Its API key.")]
Name = Annotated[str, typer.Argument(help="Name of the deployment.")]
Model = Annotated[
    str, typer.Argument(help="policies/P, policies/P/versions/N, policies/P/checkpoints/C or a base model.")
]

deployments_app = typer.Typer(help="Show what is served under a name, and change it.", add_completion=False)

HELP = "/new begins anew, /exit or Ctrl-D ends, Ctrl-C stops a reply"


def serve(
    model: Model,
    name: Name,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Serve a model under a name until the deployment is deleted. The stack must be up."""
    with running_cluster(state_dir, address, key) as cluster:
        made = cluster.serve(model, name).result()
        typer.echo(f"{made.name} serves {made.model}; talk to it with: opentinker chat {made.name}")
        with contextlib.suppress(errors.FailedPrecondition):
            typer.echo(f"  OpenAI clients: base URL {made.url}, model {made.name}, the cluster's API key")


@deployments_app.callback(invoke_without_command=True)
def list_deployments(
    context: typer.Context,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show what is served under a name."""
    context.obj = (state_dir, address, key)
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    with running_cluster(state_dir, address, key) as cluster:
        table = Table("name", "model", "base", "state", "why", "before")
        for each in cluster.deployments().result():
            before = each.previous_models[0] if each.previous_models else ""
            table.add_row(each.name, each.model, each.base_model, each.state, each.state_reason, before)
    if table.row_count:
        Console().print(table)
    else:
        typer.echo("nothing is served under a name; begin with: opentinker serve MODEL NAME")


@deployments_app.command()
def promote(context: typer.Context, name: Name, model: Model) -> None:
    """Serve other weights under the name, from the next request on."""
    with running_cluster(*context.obj) as cluster:
        done = cluster.deployment(name).result().promote(model).result()
        typer.echo(f"{done.name} serves {done.model}")


@deployments_app.command()
def roll_back(context: typer.Context, name: Name) -> None:
    """Serve again what was served before."""
    with running_cluster(*context.obj) as cluster:
        done = cluster.deployment(name).result().roll_back().result()
        typer.echo(f"{done.name} serves {done.model}")


@deployments_app.command()
def delete(context: typer.Context, name: Name) -> None:
    """Serve it no longer; the weights stay."""
    with running_cluster(*context.obj) as cluster:
        cluster.deployment(name).result().delete().result()
        typer.echo(f"{name} is served no longer")


def chat(
    name: Annotated[str, typer.Argument(help="A deployment, policies/P/versions/N, or a base model.")],
    message: Annotated[str | None, typer.Option(help="Say this, print the reply, and end.")] = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest reply.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the replies.")] = None,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Talk to a model."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with running_cluster(state_dir, address, key) as cluster:
        talk = Conversation(cluster, cluster.model(name), params, seed, system)
        if message is not None:
            talk.say(message)
            return
        shown = sys.stdin.isatty()
        if shown:
            typer.echo(f"{name}: {HELP}")
        for line in _lines(shown):
            if line == "/exit":
                break
            if line == "/new":
                talk.begin()
                typer.echo("a new conversation")
            elif line.startswith("/"):
                typer.echo(f"{line} is no command: {HELP}", err=True)
            elif line:
                try:
                    talk.say(line)
                except errors.InvalidArgument as error:
                    # A prompt that is too long, for one: the conversation goes on without this turn.
                    typer.echo(f"error: {error}", err=True)


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(
        self, cluster: Cluster, model: ServedModel, params: SamplingParams, seed: int | None, system: str
    ) -> None:
        self._cluster = cluster
        self._model = model
        self._params = params
        self._seed = seed
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was said."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> None:
        """Write a message and print the reply as it comes. A reply that is interrupted counts as far as it
        came.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        heard: list[str] = []

        async def listen() -> None:
            async for part in self._model.stream(messages, self._params, seed=self._seed):
                heard.append(part)
                typer.echo(part, nl=False)

        try:
            self._cluster.wait(listen())
        except KeyboardInterrupt:
            typer.echo(" (stopped)", nl=False)
        typer.echo()
        self._messages = [*messages, {"role": "assistant", "content": "".join(heard)}]


def _lines(shown: bool) -> Iterator[str]:
    """What the user types, until the end of input."""
    if shown:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and what was typed before
    while True:
        try:
            line = input("> " if shown else "")
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            return
        yield line.strip()


def running_cluster(state_dir: Path | None, address: str | None, key: str | None) -> Cluster:
    """The cluster that runs. What is served must outlive this command, so none is started for it."""
    if address is None:
        directory = stack.resolve(state_dir)
        if stack.holder(directory) is None:
            typer.echo(f"no stack runs under {directory}; start one with: opentinker up", err=True)
            raise typer.Exit(code=3)
        return connect(state_dir=directory)
    return connect(address, key=key)
