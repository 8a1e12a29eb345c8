"""One environment class, unchanged: trained on, evaluated, played by the served policy through OpenAI's API,
in this process and on an env_host. TypeScript plays hosted ones in `tests/polyglot/test_typescript.py`.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import opentinker as ot
from opentinker.environments import environment_source
from opentinker_kit.testing.waiting import wait_until_sync
from opentinkerapi.runtime.channels import open_channel

HERE = Path(__file__)
SERVER = {"dtype": "float32", "context_tokens": 1024}
GREEDY = ot.SamplingParams(max_tokens=6, temperature=0)
EPISODES = 6


class Letters(ot.Environment):
    """Say a letter twice; what the second reply is worth depends on both and on the seed."""

    splits: ClassVar[tuple[str, ...]] = ("train", "test")

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"letter": letter} for letter in ("abcdefgh" if split == "train" else "uvwxyz")]

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.seed, self.heard = seed, ""
        return ot.Observation(f"Say {task['letter']} and {seed % 10}.")

    def step(self, action: ot.Action) -> ot.StepResult:
        self.heard += action.text
        if len(self.heard) == len(action.text):
            return ot.StepResult(f"You said {len(self.heard)}. Again.", reward=0.25)
        return ot.StepResult(None, reward=(len(self.heard.encode()) + self.seed) % 7 / 7, terminated=True)


Said = list[tuple[float | None, tuple[str, ...]]]


def said(episodes: Sequence[Any]) -> Said:
    """What was said in each episode and what it was worth."""
    return [
        (each.reward.value, tuple(message.content.text for message in each.messages)) for each in episodes
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_class_everywhere(tiny_model_dir: Path, tmp_path: Path) -> None:
    with ot.connect(state_dir=tmp_path / "stack") as cluster:
        result = ot.fit(
            env=Letters,
            model=str(tiny_model_dir),
            tuning=ot.LoRA(rank=4),
            algorithm=ot.GRPO(group_size=4),
            groups_per_step=2,
            steps=2,
            learning_rate=1e-2,
            sampling=ot.SamplingParams(max_tokens=6),
            run_dir=tmp_path / "run",
            trainer=ot.ServerOptions(engine="torch", **SERVER),  # type: ignore[arg-type]
            inference=ot.ServerOptions(engine="transformers", **SERVER),  # type: ignore[arg-type]
            progress=False,
            cluster=cluster,
        )
        evaluated = ot.evaluate(result.policy, Letters, sampling=GREEDY)
        trajectories = [each for group in evaluated.groups for each in group.trajectories]
        expected = said(trajectories)
        assert len(expected) == EPISODES
        assert all(value is not None and value >= 0.25 for value, _ in expected)

        deployment = result.policy.deploy("letters").result()
        served: dict[str, Any] = {
            "base_url": deployment.url,
            "api_key": cluster.api_key,
            "model": deployment.name,
            "sampling": GREEDY,
        }
        assert said(ot.play(Letters, **served)) == expected
        assert said(asyncio.run(play_hosted(tmp_path / "host", served))) == expected
        deployment.delete().result()


async def play_hosted(folder: Path, served: dict[str, Any]) -> list[ot.PlayedEpisode]:
    """The same class in a worker of an env_host, by its name."""
    folder.mkdir()
    ready, settings = folder / "ready.json", folder / "settings.json"
    hosted = {"target": f"{HERE.stem}:Letters", "path": [str(HERE.parent)]}
    written = {"environments": {"letters": hosted}, "state_dir": str(folder), "ready_file": str(ready)}
    settings.write_text(json.dumps(written))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(settings)]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:  # noqa: ASYNC220
        try:
            wait_until_sync(ready.exists, 60, what="env_host is ready")
            async with open_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}") as channel:
                source = await environment_source("letters", channel=channel)
                played = await ot.play_async(source, **served)
                await source.close()
                return played
        finally:
            process.terminate()
