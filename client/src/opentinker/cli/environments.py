"""Commands around environments: env serve, push, list, show, delete, logs, probe."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker import errors
from opentinker.cli.logs import printable
from opentinker.cli.serving import Address, Key, StateDir, running_cluster
from opentinker.cli.tables import show as show_table
from opentinker.connection import env_server
from opentinker.connection.uploads import PREFIX, STATES, Uploads
from opentinker.environments.packing import pack
from opentinker.environments.probe import Check, ProbeReport, Timing
from opentinkerapi.env.v1 import package_pb2
from opentinkerapi.runtime.channels import open_channel

Work = Callable[[Uploads], Coroutine[Any, Any, Any]]
Call = Callable[[Work], Any]
"""Runs what is to be done with the uploads to its end."""

Name = Annotated[str, typer.Argument(help="NAME@VERSION, or NAME for its newest version.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

env_app = typer.Typer(
    help="Serve, upload and probe environments.", add_completion=False, no_args_is_help=True
)


@env_app.callback()
def env(
    context: typer.Context,
    at: Annotated[str, typer.Option(help="host:port of an env_host itself, instead of a cluster's.")] = "",
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Serve, upload and probe environments."""
    context.obj = (at, state_dir, address, key)


@env_app.command()
def serve(
    target: Annotated[str, typer.Argument(help="module:Class, found from this folder.")],
    name: Annotated[str, typer.Option(help="What it is called (default: the class, in lower case).")] = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a key is made.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    path: Annotated[
        list[Path] | None, typer.Option(help="Folder to find the module in (default: here).")
    ] = None,
    exclusive: Annotated[bool, typer.Option(help="One episode per process.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Most threads that play in a process.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for logs and the journal; it survives.")] = None,
    probe_first: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Look first whether it heeds its seed.")
    ] = True,
) -> None:
    """Run an env_host here with one class, with what this Python has installed, until Ctrl-C."""
    folders = [str(each.resolve()) for each in path or [Path.cwd()]]
    if probe_first:
        _warn(_probe_here(target, folders, {}))
    called = name or target.rpartition(":")[2].rpartition(".")[2].lower()
    options: dict[str, Any] = {"host": host, "port": port, "exclusive": exclusive}
    with env_server.serve(
        target, name=called, path=folders, threads=threads, state_dir=keep, **options
    ) as served:
        typer.echo(f"{target} is served as {called} at {served.address}")
        if served.key_file is not None:
            typer.echo(f"  callers need the key in {served.key_file}")
        typer.echo(f"  try it: opentinker env --at {served.address} probe {called}")
        with contextlib.suppress(KeyboardInterrupt):
            status = served.process.wait()
            typer.echo(f"the host ended with status {status}; see {served.log}", err=True)
            raise typer.Exit(code=1)
    typer.echo("stopped")


@env_app.command()
def push(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder of Python source, or a wheel.")],
    name: Annotated[str, typer.Option(help="Name of the environment (default: of the project).")] = "",
    target: Annotated[str, typer.Option(help="module:Class (default: of its pyproject.toml).")] = "",
    requirement: Annotated[
        list[str] | None, typer.Option("--requirement", "-r", help="A further requirement; may be repeated.")
    ] = None,
    exclusive: Annotated[bool, typer.Option(help="One episode per process.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the build to its end.")] = True,
    as_json: AsJson = False,
) -> None:
    """Upload an environment as a new version. The same files are the same version."""
    packed = pack(folder, name=name, target=target, requirements=requirement or ())

    async def upload(uploads: Uploads) -> package_pb2.EnvironmentVersion:
        version = await uploads.push(packed, exclusive=exclusive)
        if wait:
            async for state, said in uploads.building(version.name):
                version = state
                if said and not as_json:
                    typer.echo(printable(said), nl=False)
        return version

    with _calling(context) as call:
        version = call(upload)
    if as_json:
        typer.echo(json.dumps(_plain(version)))
    else:
        typer.echo(_sentence(version))
        _warn_of(version.warnings)
    if version.state == package_pb2.PACKAGE_STATE_FAILED:
        raise typer.Exit(code=1)


@env_app.command("list")
def list_versions(context: typer.Context, as_json: AsJson = False) -> None:
    """Show what the project uploaded."""
    with _calling(context) as call:
        found = call(lambda uploads: uploads.versions())
    if as_json:
        typer.echo(json.dumps([_plain(version) for version in found]))
        return
    rows = [
        (
            version.name.removeprefix(PREFIX),
            STATES.get(version.state, "?"),
            version.spec.target,
            f"{version.size_bytes:,}",
            version.create_time.ToDatetime(UTC).isoformat(timespec="seconds"),
            printable(version.build_error or "; ".join(version.warnings))[:200],
        )
        for version in found
    ]
    titles = ("environment", "state", "class", "bytes", "since", "trouble")
    show_table(titles, rows, "nothing was uploaded: opentinker env push FOLDER", sparse=("trouble",))


@env_app.command()
def show(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show a version."""
    with _calling(context) as call:
        version = call(lambda uploads: uploads.get(name))
    if as_json:
        typer.echo(json.dumps(_plain(version)))
        return
    typer.echo(_sentence(version))
    for title, text in _plain(version).items():
        if text not in ("", [], None, False):
            shown = ", ".join(text) if isinstance(text, list) else str(text)
            typer.echo(f"  {title:16} {printable(shown)}")


@env_app.command()
def delete(context: typer.Context, name: Annotated[str, typer.Argument(help="NAME@VERSION.")]) -> None:
    """Remove a version that nobody plays. Its number is not given again."""
    with _calling(context) as call:
        call(lambda uploads: uploads.delete(name))
    typer.echo(f"{name} is gone")


@env_app.command()
def logs(
    context: typer.Context,
    name: Name,
    size: Annotated[int, typer.Option("--bytes", min=1, max=262_144, help="So much of each log.")] = 65_536,
) -> None:
    """Show what a version's build and its workers wrote."""
    with _calling(context) as call:
        found = call(lambda uploads: uploads.logs(name, size))
    typer.echo(f"== build\n{printable(found.build_log).rstrip()}")
    for each in found.worker_logs:
        typer.echo(f"== worker {each.worker}\n{printable(each.text).rstrip()}")


@env_app.command()
def probe(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="NAME or NAME@VERSION on a host, or module:Class here.")],
    options: Annotated[str, typer.Option(help="Options of the environment, a JSON object.")] = "{}",
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Seeds to play with.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Most steps of an episode.")] = 8,
    action: Annotated[
        list[str] | None, typer.Option(help="What the agent says, in turn; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play an environment and report: does it repeat itself, heed its seed, give valid rewards?

    Ends with 1 if something is wrong.
    """
    given = _options(options)
    asked: dict[str, Any] = {"seeds": seeds, "steps": steps, "actions": action or []}
    if ":" in name:
        report = _probe_here(name, [str(Path.cwd())], {"options": given, **asked})
    else:
        with _calling(context) as call:
            report = call(lambda uploads: uploads.probe(name, given, **asked))
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        rows = [(check.name, check.verdict.lower(), printable(check.detail)) for check in report.checks]
        show_table(("check", "verdict", "detail"), rows, "nothing was looked at", sparse=("detail",))
        for each in report.timings:
            typer.echo(
                f"{each.call:7} {each.count:5} x  median {each.median_s * 1e3:.2f} ms, "
                f"longest {each.longest_s * 1e3:.2f} ms"
            )
        _warn(report)
    if report.warnings:
        raise typer.Exit(code=1)


@contextlib.contextmanager
def _calling(context: typer.Context) -> Iterator[Call]:
    """How to make calls on the env_host of a cluster, or on one by itself."""
    at, state_dir, address, key = context.obj
    if at:

        async def alone(work: Work) -> Any:
            async with open_channel(at, key=key) as channel:
                return await work(Uploads(channel))

        yield lambda work: asyncio.run(alone(work))
        return
    with running_cluster(state_dir, address, key) as cluster:

        async def within(work: Work) -> Any:
            channel = await cluster.env_channel()
            if channel is None:
                raise errors.invalid("env", "this cluster has no env_host; name one with --at host:port")
            return await work(Uploads(channel))

        yield lambda work: cluster.wait(within(work))


def _probe_here(target: str, path: list[str], request: dict[str, Any]) -> ProbeReport:
    """Probe a class of this folder, in a process of its own: whatever it prints or breaks stays there."""
    words = [sys.executable, "-P", "-m", "opentinker.environments.probe", target]
    for folder in path:
        words += ["--path", folder]
    words += ["--request", json.dumps(request)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip()[-500:] or f"status {done.returncode}"
        raise errors.invalid("target", f"{target} ended its probe: {last}") from None
    if "error" in said:
        raise errors.invalid("target", f"{target} cannot be played: {said['error']}")
    return ProbeReport(
        said["environment"],
        said["deterministic"],
        tuple(Check(**check) for check in said["checks"]),
        tuple(said["warnings"]),
        tuple(Timing(**timing) for timing in said["timings"]),
        said["episodes"],
        said["steps"],
    )


def _warn(report: ProbeReport) -> None:
    _warn_of(report.warnings)


def _warn_of(warnings: Iterable[str]) -> None:
    for warning in warnings:
        typer.secho(f"WARNING: {printable(warning)}", fg="red", bold=True, err=True)


def _options(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise errors.invalid("options", f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise errors.invalid("options", "must be a JSON object")
    return value


def _sentence(version: package_pb2.EnvironmentVersion) -> str:
    name = version.name.removeprefix(PREFIX)
    if version.state == package_pb2.PACKAGE_STATE_READY:
        return f'{name} is ready: fit(env="{name}")'
    if version.state == package_pb2.PACKAGE_STATE_FAILED:
        text = f"{name} cannot be played: {printable(version.build_error)}"
        return f"{text}\nits log: opentinker env logs {name}"
    return f"{name} is being built: opentinker env show {name}"


def _plain(version: package_pb2.EnvironmentVersion) -> dict[str, Any]:
    spec = version.spec
    return {
        "name": version.name.removeprefix(PREFIX),
        "state": STATES.get(version.state, "?"),
        "target": spec.target,
        "requirements": list(spec.requirements),
        "requires_python": spec.requires_python,
        "wheel": spec.wheel,
        "exclusive": spec.exclusive,
        "sha256": version.sha256,
        "size_bytes": version.size_bytes,
        "create_time": version.create_time.ToDatetime(UTC).isoformat(),
        "build_error": version.build_error,
        "warnings": list(version.warnings),
    }
