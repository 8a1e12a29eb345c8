"""Lines of servers' logs: when they were written and which job they are about.

Servers write JSON objects, one a line (`opentinker_kit.logging`). A line is about a job if the object says so
(`"job": "jobs/…"`); servers serve many jobs, so nothing else may be shown to who owns one of them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Written:
    """A line of a log."""

    text: bytes
    """Without its end."""
    time: datetime | None
    """None where it does not say."""
    job: str
    """`jobs/{job}`; empty where it is about none, or about several."""


def read_line(text: bytes) -> Written:
    """What a line says of itself; one that is no JSON object says nothing."""
    values: Any = None
    if text.startswith(b"{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
    if not isinstance(values, dict):
        return Written(text, None, "")
    job = values.get("job")
    return Written(text, _time(values.get("timestamp")), job if isinstance(job, str) else "")


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def is_about(written: Written, job: str) -> bool:
    """Whether a line is about a job, or, with none named, about anything."""
    return written.job == job if job else bool(written.text.strip())


def may_be_about(data: bytes, job: str) -> bool:
    """False where no line of these can be about a job: what a busy server writes is mostly about others, and
    need not be read to know that."""
    return not job or f'"{job}"'.encode() in data


def about_nobody(lines: Iterable[str]) -> Iterator[str]:
    """Those of the lines that are not about one job: what each job on a server may be told of it."""
    return (line for line in lines if '"job"' not in line or not read_line(line.encode()).job)
