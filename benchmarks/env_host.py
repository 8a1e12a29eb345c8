"""How fast env_host plays, its workers isolated, against OpenEnv's in-process WebSocket server.

The same game, the same number of episodes at once, each with a task of its own that steps as fast as it is
answered; steps a second from the first to the last one. Ours: sessions of a hosted source, env_host and its
workers in processes of their own. Theirs: their client and server. `episodes_64`, `episodes_512`: a light
step. `blocking`: 64 episodes whose step, an `async` one on both sides, blocks for 50 ms; ours has 32 event
loops a worker (`threads`). Run only by `--case`: `blocking_plain`, a plain step, for which they have a thread
for each session, and `blocking_mcp`, one on their class for environments with tools. `raw` has, beside the
pairs, milliseconds of a unary Step and of one over Drive with nothing else going on (median), and of an
episode from OpenGroup to CloseEpisodes without a step.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import env_openenv
from benchmarks.pairs import ROOT, Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result

MEASURED = ("benchmarks", "services/env_host/src", "services/kit/src", "client/src/opentinker/environments")
PAUSE = 0.05
LOOPS = 32
BASELINE = "OpenEnv's in-process WebSocket server and client"
PROBES = 400


@dataclass(frozen=True, slots=True)
class Case:
    """How many episodes, how many steps each, and of which environment."""

    episodes: int
    steps: int
    ours: str = "plain"
    theirs: str = "plain"
    pause: float = 0.0

    @property
    def options(self) -> Mapping[str, Any]:
        return {"pause": self.pause} if self.pause else {}


CASES: Mapping[str, Case] = {
    "episodes_64": Case(64, 200),
    "episodes_512": Case(512, 30),
    "blocking": Case(64, 5, "on_the_loop", "on_the_loop", PAUSE),
    "blocking_plain": Case(64, 40, pause=PAUSE),
    "blocking_mcp": Case(64, 20, "plain", "mcp", PAUSE),
}
DEFAULT_CASES = ("episodes_64", "episodes_512", "blocking")


def run(options: Options) -> Iterable[Result]:
    unknown = options.cases - CASES.keys()
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}; there are: {', '.join(CASES)}")
    env_openenv.ensure_openenv()
    cases = [case for case in CASES if case in (options.cases or DEFAULT_CASES)]
    for case in cases:
        yield _case(options, case, CASES[case])
    forget("env_host", cases)


def _case(options: Options, name: str, case: Case) -> Result:
    hosts: list[Host] = []

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        hosts.append(stack.enter_context(Host(case)))
        server = stack.enter_context(
            Program("env_openenv", "--kind", case.theirs, "--pause", str(case.pause))
        )
        loop = stack.enter_context(asyncio.Runner())
        port = int(server.first["port"])
        return (
            lambda: hosts[-1].run(hosts[-1].play()),
            lambda: loop.run(env_openenv.play(port, case.episodes, case.steps)),
        )

    return measure(
        options,
        "env_host",
        name,
        sides,
        baseline=BASELINE,
        work=case.episodes * case.steps,
        unit="steps_per_s",
        extra=lambda: hosts[-1].run(hosts[-1].figures()),
        measured=MEASURED,
    )


class Host:
    """A real env_host in a process of its own, and a source of episodes there."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._stack = ExitStack()

    def __enter__(self) -> "Host":
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ot-env-host-")))
        entries = {
            name: {"target": f"benchmarks.env_ours:{target}", "path": [str(ROOT)], **more}
            for name, target, more in (
                ("plain", "Plain", {}),
                ("on_the_loop", "OnTheLoop", {"threads": LOOPS}),
            )
        }
        ready = folder / "ready.json"
        settings = {
            "environments": {self._case.ours: entries[self._case.ours]},
            "state_dir": str(folder / "state"),
            "ready_file": str(ready),
            "drain_s": 0.5,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
        log = self._stack.enter_context((folder / "log").open("wb"))
        process = self._stack.enter_context(subprocess.Popen(command, stderr=log, stdout=log))
        self._stack.callback(process.terminate)
        deadline = time.monotonic() + 60.0
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"env_host did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        self._runner = self._stack.enter_context(asyncio.Runner())
        self.run(self._open(json.loads(ready.read_text())["port"]))
        self._stack.callback(lambda: self.run(self._close()))
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def play(self) -> float:
        """Seconds of the case's steps."""
        from opentinker.environments.types import Action

        case = self._case
        sessions: list[Any] = []
        for seed in range(case.episodes):
            sessions += await self._source.open_group(task={}, seed=seed, size=1)
        await asyncio.gather(*(session.begin() for session in sessions))

        async def one(session: Any) -> None:
            for step in range(case.steps):
                result = await session.step(Action(str(step)), step + 1)
                assert not result.done

        began = time.perf_counter()
        await asyncio.gather(*(one(session) for session in sessions))
        seconds = time.perf_counter() - began
        await self._source.release([session.episode for session in sessions])
        return seconds

    async def figures(self) -> dict[str, object]:
        """Milliseconds of a step, unary and over Drive, and of an episode."""
        from opentinker.environments.types import AGENT, Action
        from opentinker.environments.wire import actions_to_proto
        from opentinkerapi.env.v1 import env_host_service_pb2 as pb

        probes = PROBES if not self._case.pause else 10
        session, other = await self._source.open_group(task={}, seed=1, size=2)
        await session.begin()
        await other.begin()
        driven, unary = [], []
        for step in range(1, probes + 1):
            began = time.perf_counter()
            await session.step(Action(str(step)), step)
            driven.append(1000 * (time.perf_counter() - began))
            actions = actions_to_proto({AGENT: Action(str(step))})
            request = pb.StepRequest(episode=other.episode, seq=step, actions=actions)
            began = time.perf_counter()
            await self._source.stub.Step(request, timeout=10.0)
            unary.append(1000 * (time.perf_counter() - began))
        await self._source.release([session.episode, other.episode])
        episodes = []
        for seed in range(probes // 4 or 1):
            began = time.perf_counter()
            (session,) = await self._source.open_group(task={}, seed=seed, size=1)
            await session.begin()
            await session.close()
            episodes.append(1000 * (time.perf_counter() - began))
        return {
            "unary_p50_ms": round(statistics.median(unary), 3),
            "drive_p50_ms": round(statistics.median(driven), 3),
            "episode_p50_ms": round(statistics.median(episodes), 3),
        }

    async def _open(self, port: int) -> None:
        from opentinker.environments.hosted import HostedEnvironment
        from opentinker.environments.sources import environment_source
        from opentinkerapi.runtime.channels import open_channel

        self._channel = open_channel(f"127.0.0.1:{port}")
        source = await environment_source(self._case.ours, self._case.options, channel=self._channel)
        assert isinstance(source, HostedEnvironment)
        self._source = source

    async def _close(self) -> None:
        await self._source.close()
        await self._channel.close()
