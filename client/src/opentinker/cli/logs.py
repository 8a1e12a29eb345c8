"""The command `logs`: what became of a job, and what its servers wrote about it."""

import json
from collections.abc import AsyncIterator
from datetime import UTC
from typing import Annotated, Any

import typer

from opentinker.cli.jobs import word
from opentinker.cli.serving import Address, Key, StateDir, running_cluster
from opentinker.connection.project_jobs import ProjectJobs
from opentinkerapi.scheduler.v1 import job_pb2, log_pb2

_SHOWN_ELSEWHERE = ("timestamp", "level", "event", "exception", "service", "instance")


def logs(
    name: Annotated[
        str, typer.Argument(help="JOB or jobs/JOB; for admins of the cluster also servers/SERVER.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, max=10_000, help="Begin with so many of the last.")
    ] = None,
    server: Annotated[str, typer.Option(help="Only of this server, servers/SERVER.")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="All lines of the job's servers; for admins of the cluster.")
    ] = False,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show what became of a job and what its servers wrote about it; Ctrl-C leaves the job as it is."""
    with running_cluster(state_dir, address, key) as cluster:
        found = ProjectJobs(cluster.control).logs(
            name, follow=follow, tail_lines=lines, server=server, all_lines=everything
        )
        try:
            cluster.wait(_show(found))
        except KeyboardInterrupt:
            return


async def _show(lines: AsyncIterator[log_pb2.LogLine]) -> None:
    async for line in lines:
        typer.echo(in_words(line))


def in_words(line: log_pb2.LogLine) -> str:
    """A line of a log, for people: when, who, what."""
    time = f"{line.time.ToDatetime(UTC):%Y-%m-%d %H:%M:%S}" if line.HasField("time") else " " * 19
    who = f"{word(job_pb2.SlotRole, line.role)} {line.server.removeprefix('servers/')[:8]}"
    what = _record(line.text) if line.server else line.text
    return f"{time} {who if line.server else 'scheduler':18} {printable(what)}"


def _record(text: str) -> str:
    """What a server wrote: a JSON object in words, anything else as it is."""
    values: Any = None
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return text
    if not isinstance(values, dict):
        return text
    details = [f"{key}={_value(value)}" for key, value in values.items() if key not in _SHOWN_ELSEWHERE]
    words = " ".join([f"{values.get('level', ''):7} {values.get('event', '')}".rstrip(), *details])
    trace = str(values.get("exception", "")).strip()
    return words + "".join(f"\n    {each}" for each in trace.splitlines())


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value and " " not in value else json.dumps(value)


def printable(text: str) -> str:
    """Without what a terminal would take for a command: a log holds what others wrote."""
    return "".join(each if each.isprintable() or each in "\n\t" else f"\\x{ord(each):02x}" for each in text)
