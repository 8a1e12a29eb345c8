"""Probes: a program of the client library that plays an environment where its workers would run."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from typing import Any

from opentinker_env_host.adapters.worker_process import WorkerProgram, worker_environment
from opentinker_env_host.domain.packages import Package
from opentinker_env_host.ports import Plain
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

PROGRAM = "opentinker.environments.probe"
MAX_REPORT_BYTES = 1 << 20
_REFUSED = ("InvalidOptions", "ValueError")


class ProcessProber:
    """Runs one program for each probe."""

    def __init__(self, program: Callable[[str | Package], WorkerProgram], timeout_s: float) -> None:
        self._program = program
        self._timeout_s = timeout_s

    async def probe(self, environment: str | Package, request: Plain) -> Plain:
        words = self._program(environment).command(PROGRAM, "--request", json.dumps(request))
        with tempfile.TemporaryFile() as said:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=said,
                env=worker_environment(),
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    printed = await _read(process)
            except TimeoutError:
                text = f"the probe was not over within {self._timeout_s:g} s: ask for fewer seeds or steps"
                raise ServiceError(Reason.STEP_TIMEOUT, text) from None
            finally:
                # Its group, too: whatever the environment started.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            said.seek(max(0, said.seek(0, os.SEEK_END) - 300))
            last = said.read().decode(errors="replace").strip()
        return _report(printed, last)


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    parts: list[bytes] = []
    while part := await process.stdout.read(1 << 16):
        parts.append(part)
        if sum(map(len, parts)) > MAX_REPORT_BYTES:
            raise ServiceError(Reason.ENV_CRASHED, "the probe said too much")
    return b"".join(parts)


def _report(printed: bytes, last: str) -> Plain:
    """What it printed, as far as it is a report; an environment that was uploaded may print anything."""
    try:
        value: Any = json.loads(printed)
        if "error" in value:
            text = str(value["error"])
            if text.startswith(_REFUSED):
                raise ServiceError(Reason.INVALID_FIELD, text, field="options_json")
            raise ServiceError(Reason.ENV_CRASHED, f"the environment cannot be probed: {text}")
        return {
            "checks": [
                {key: str(each[key])[:2000] for key in ("name", "verdict", "detail")}
                for each in value["checks"]
            ],
            "warnings": [str(text)[:2000] for text in value["warnings"]],
            "timings": [
                {
                    "call": str(each["call"])[:40],
                    "count": _count(each["count"]),
                    "median_s": _seconds(each["median_s"]),
                    "longest_s": _seconds(each["longest_s"]),
                }
                for each in value["timings"]
            ],
            "episodes": _count(value["episodes"]),
            "steps": _count(value["steps"]),
            "deterministic": bool(value["deterministic"]),
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"the environment ended its probe: {last or 'it printed nothing'}"
        raise ServiceError(Reason.ENV_CRASHED, text) from None


def _seconds(value: Any) -> float:
    seconds = float(value)
    return seconds if 0.0 <= seconds <= 86_400.0 else 0.0


def _count(value: Any) -> int:
    return min(max(int(value), 0), 1 << 30)
