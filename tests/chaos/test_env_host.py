"""kill -9 of an env_host under hundreds of episodes that clients play, and a new one in its place: those that
repeat themselves go on as if nothing had been, also where the end of the journal or all of it is gone; those
that do not end as lost, and nothing is a reward by accident (field bugs B108, B110).
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from opentinker.environments import (
    Action,
    EndReason,
    EnvironmentSession,
    EnvironmentSource,
    end_reason_of,
    environment_source,
)
from opentinker_kit.testing.waiting import wait_until, wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLDS = Path(__file__).resolve().parents[2] / "services" / "env_host" / "tests" / "worlds"
STEPS = 12
REPEATING, OTHERS = 400, 100


@contextmanager
def host(folder: Path, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """An env_host in a process of its own; its port."""
    ready, settings = folder / "ready.json", folder / "settings.json"
    ready.unlink(missing_ok=True)
    environments = {
        name: {"target": f"worlds:{cls}", "path": [str(WORLDS)]}
        for name, cls in (("counter", "Counter"), ("honest", "Honest"))
    }
    written = {
        "environments": environments,
        "state_dir": str(folder / "state"),
        "ready_file": str(ready),
        "listen_port": port,
        "drain_s": 0.5,
    }
    settings.write_text(json.dumps(written))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(settings)]
    with (folder / "log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until_sync(ready.exists, 60, what="env_host is ready")
            yield json.loads(ready.read_text())["port"], process
        finally:
            process.kill()


class Played:
    """What came of an episode: its reward, or what ended it."""

    def __init__(self, session: EnvironmentSession) -> None:
        self._session = session
        self.steps = 0
        self.end: EndReason | None = None
        self.reward: float | None = None
        self.seen: list[str] = []

    async def play(self) -> None:
        try:
            self.seen.append((await self._session.begin()).text)
            for seq in range(1, STEPS + 1):
                # Some at a time, so that the host dies in the middle of all of them.
                await asyncio.sleep(random.random() * 0.3)
                result = await self._session.step(Action("end" if seq == STEPS else "go"), seq)
                self.steps = seq
                if result.observation is not None:
                    self.seen.append(result.observation.text)
            self.reward = (await self._session.finalize()).reward.value
            self.end = EndReason.TERMINATED
        except OpenTinkerError as error:
            self.end = end_reason_of(error)
            if self.end is None:
                raise


def nothing(state: Path) -> None:
    """The journal is as the killed process left it."""


def torn(state: Path) -> None:
    """The machine lost its power: the last lines are gone, the one before them is half there."""
    journal = state / "episodes.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: int(len(data) * 0.8)] + b'\x00\x00["st')


def gone(state: Path) -> None:
    """Another machine takes over: there is no journal."""
    (state / "episodes.journal").unlink()


@pytest.mark.parametrize("becomes", [nothing, torn, gone])
async def test_kill_9_of_the_host_under_live_episodes(
    tmp_path: Path, becomes: Callable[[Path], None]
) -> None:
    channels: list[Any] = []

    async def source(name: str, port: int) -> EnvironmentSource:
        channels.append(open_channel(f"127.0.0.1:{port}"))
        return await environment_source(name, channel=channels[-1])

    with host(tmp_path) as (port, process):
        repeating, honest = await source("counter", port), await source("honest", port)
        played = [
            Played(session)
            for opened, size in ((repeating, REPEATING), (honest, OTHERS))
            for session in await opened.open_group(task={}, seed=7, size=size)
        ]
        playing = [asyncio.create_task(each.play()) for each in played]
        await wait_until(lambda: sum(each.steps for each in played) > 2 * len(played), 60, what="all play")
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # Nobody is left behind to hold memory.
    await wait_until(lambda: not any(each.is_running() for each in workers), 10, what="its workers are gone")
    becomes(tmp_path / "state")
    with host(tmp_path, port):
        async with asyncio.timeout(150):
            await asyncio.gather(*playing)
        before, after = played[:REPEATING], played[REPEATING:]
        assert Counter(each.end for each in before) == {EndReason.TERMINATED: REPEATING}
        # 0.5 for each step but the last, which gives the count.
        assert {each.reward for each in before} == {0.5 * (STEPS - 1) + STEPS}
        assert len({tuple(each.seen) for each in before}) == 1
        lost = [each for each in after if each.end is not EndReason.TERMINATED]
        assert {each.end for each in lost} == {EndReason.SANDBOX_LOST}
        assert not EndReason.SANDBOX_LOST.trainable
        assert len(lost) > OTHERS / 2
        assert all(each.reward is None for each in lost)
        assert all(each.reward for each in after if each not in lost)
        for opened in (repeating, honest):
            await opened.close()
    for channel in channels:
        await channel.close()
