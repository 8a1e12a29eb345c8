"""Plays an environment with a script, as the loop would with a model: for tests of an environment's rules."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import opentinker as ot
from opentinker.environments.tools import Tool
from opentinker.rollout.tool_calls import parse

Script = Callable[[ot.Observation, random.Random], str]


def heard(said: str, tools: tuple[Tool, ...]) -> ot.Action:
    """What a script said, with its tool calls."""
    read = parse(said, [tool.name for tool in tools]) if tools else None
    return ot.Action(read.text, read.tool_calls) if read else ot.Action(said)


def play(
    environment: ot.Environment, script: Script, *, seed: int = 0, task: dict[str, Any] | None = None
) -> tuple[float, list[str]]:
    """The reward of an episode, and what was seen in it."""
    dice = random.Random(seed)
    seen: Any = environment.reset(seed=seed, task=task or {})
    told, total = [], 0.0
    for _ in range(100):
        told.append(
            "".join(
                str(getattr(part, "text", "")) for each in seen.as_messages() for part in each.content.parts
            )
        )
        step: Any = environment.step(heard(script(seen, dice), environment.tools))
        total += step.reward.value or 0.0
        if step.done:
            return total, told
        seen = step.observation
    raise AssertionError("it never ends")


def rewards(
    make: Callable[[], ot.Environment], script: Callable[[], Script], episodes: int = 200
) -> Iterator[float]:
    """Of many episodes, the held-out tasks among them."""
    tasks = make().tasks("test") or []
    for seed in range(episodes):
        task = dict(tasks[seed]) if seed < len(tasks) else None
        yield play(make(), script(), seed=seed, task=task)[0]
