"""What jails there can be on this machine, as a worker would find it: asked of a program, once.

The host runs no untrusted code and imports nothing that does; `opentinker.sandbox` belongs to the workers.
"""

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import structlog

from opentinker_env_host.adapters.worker_process import worker_environment
from opentinker_env_host.ports import SandboxFacts

log = structlog.get_logger()

PROGRAM = "opentinker.sandbox"
TIMEOUT_S = 30.0


class SandboxProbe:
    """Asks the program of an interpreter. What it said is kept if there are jails, otherwise asked again."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._turn = asyncio.Lock()
        self._known: SandboxFacts | None = None

    async def facts(self) -> SandboxFacts:
        async with self._turn:
            if self._known is not None:
                return self._known
            facts = await self._ask()
            if facts.mode:
                self._known = facts
            return facts

    async def _ask(self) -> SandboxFacts:
        try:
            process = await asyncio.create_subprocess_exec(
                str(self._python),
                "-P",
                "-m",
                PROGRAM,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=DEVNULL,
                env=worker_environment(),
            )
        except OSError as error:
            return SandboxFacts(error=f"{self._python}: {error.strerror}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                printed, _ = await process.communicate()
        except TimeoutError:
            return SandboxFacts(error=f"no answer within {TIMEOUT_S:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        try:
            said = json.loads(printed)
            return SandboxFacts(
                str(said["mode"] or ""), str(said.get("bubblewrap", "")), str(said.get("error", ""))
            )
        except (ValueError, KeyError, TypeError):
            log.warning("the sandbox's program said nothing", status=process.returncode)
            return SandboxFacts(error=f"{self._python} has no {PROGRAM} that works")
