"""A stage for environments that own the model loop: the real gateway over doubles, and a real env_host."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import KEY

from opentinker.connection.portal import Portal
from opentinker.environments import EnvironmentSource
from opentinker.rollout.cast import Voice
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.recorded_agent import RecordedAgent
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.params import SamplingParams
from opentinker_kit.testing.waiting import wait_until_sync


@contextmanager
def hosting(folder: Path, environments: Mapping[str, Mapping[str, Any]]) -> Iterator[int]:
    """A real env_host with these environments, in a process of its own; its port."""
    settings = {
        "environments": environments,
        "state_dir": str(folder / "state"),
        "ready_file": str(folder / "ready.json"),
        "drain_s": 0.5,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            ready = folder / "ready.json"
            wait_until_sync(ready.exists, 60, what=f"env_host is ready; see {folder / 'log'}")
            yield json.loads(ready.read_text())["port"]
        finally:
            process.terminate()


class Stage:
    """Plays episodes of a source with the gateway of a world."""

    def __init__(self, world: World, source: EnvironmentSource) -> None:
        async def info() -> Any:
            return SimpleNamespace(gateway_address=world.url)

        self.world = world
        self.source = source
        cluster = SimpleNamespace(info=info, control=SimpleNamespace(key=KEY), portal=Portal.here())
        policy: Any = SimpleNamespace(name="policies/p", version=3, cluster=cluster)
        self._voice = Voice("policy", None, None, 0, 3, True, policy)  # type: ignore[arg-type]

    async def loop(self, task: dict[str, Any], limits: Limits, **params: Any) -> EpisodeLoop:
        (session,) = await self.source.open_group(task=task, seed=5, size=1)
        self.agent = RecordedAgent(
            self._voice, SamplingParams(**params), limits, group="g/1", member=0, seed=11
        )
        return EpisodeLoop(session, {"agent": self.agent}, limits)

    async def play(
        self, task: dict[str, Any] | None = None, limits: Limits | None = None, **params: Any
    ) -> Trajectory:
        loop = await self.loop(task or {}, limits or Limits(), **params)
        assert not await loop.begin()
        (trajectory,) = await loop.play()
        assert await self.at_gateway("GET") == 404, "the episode at the gateway outlives the one played"
        return trajectory

    async def at_gateway(self, method: str) -> int:
        """Status of a call on the episode at the gateway."""
        assert self.agent._episode is not None
        async with self.world.http() as http:
            return (await http.request(method, f"/episodes/{self.agent._episode.id}")).status_code
