"""Environments of one turn from tasks and a reward function."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from opentinker.environments.base import Environment, EnvironmentClass, Task
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.rewards import Reward, RewardStatus
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source

RewardFunction = Callable[[str, dict[str, Any]], "Reward | float | Awaitable[Reward | float | None] | None"]
Prompt = str | Callable[[dict[str, Any]], "str | Sequence[Mapping[str, Any]] | Observation"]


def single_turn(
    tasks: "Sequence[Task] | Source | Mapping[str, Sequence[Task] | Source]",
    *,
    reward: RewardFunction,
    prompt: Prompt | None = None,
    name: str = "single_turn",
) -> EnvironmentClass:
    """An environment class: one question, one answer, a reward.

    `tasks` is a sequence of JSON objects or what `ot.tasks` reads: a file, a data set (the split "train"); or
    one for each split. `prompt` makes
    the question of a task: a format string (`"{a} + {b} ="`) or a function; by default the task's "messages"
    or "prompt". `reward(answer, task)`, plain or async, gives a number, a Reward, or None for unscored; if it
    raises or gives NaN, the episode has no reward (GRADER_ERROR) and its info says why.
    """
    given = dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    splits: dict[str, Sequence[Task]] = {split: listed(rows, split) for split, rows in given.items()}
    if not splits or any(len(split) == 0 for split in splits.values()):
        raise EnvironmentDefinitionError("single_turn needs at least one task in every split")
    ask = asker(prompt)

    class SingleTurn(Environment):
        max_turns: ClassVar[int] = 1

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._task = task
            return ask(task)

        def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
            # A failing grader is data about this episode, not the end of the run.
            try:
                value = reward(action.text, self._task)
                return _graded_later(value) if isinstance(value, Awaitable) else _graded(value)
            except Exception as error:
                return _not_graded(error)

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

    SingleTurn.awaits = inspect.iscoroutinefunction(reward)
    SingleTurn.splits = tuple(splits)
    SingleTurn.__name__ = SingleTurn.__qualname__ = name
    SingleTurn.__doc__ = (
        inspect.getdoc(reward) or f"One question and one answer; {len(splits)} split(s) of tasks."
    )
    return SingleTurn


def listed(rows: Any, split: str) -> Sequence[Task]:
    """The tasks of a split: a sequence as it is, or what `ot.tasks` reads."""
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        return rows
    # Only here: reading data needs the client's errors, defining an environment does not.
    from opentinker.environments.tasks import tasks

    return tasks(rows, name=split)


def _graded(value: Reward | float | None) -> StepResult:
    return StepResult(reward=value, terminated=True)


async def _graded_later(value: Awaitable[Reward | float | None]) -> StepResult:
    try:
        return _graded(await value)
    except Exception as error:
        return _not_graded(error)


def _not_graded(error: Exception) -> StepResult:
    info = {"grader_error": f"{type(error).__name__}: {error}"}
    return StepResult(reward=Reward.failed(RewardStatus.GRADER_ERROR), terminated=True, info=info)


def asker(prompt: Prompt | None) -> Callable[[dict[str, Any]], Observation]:
    """Makes the first observation of a task, as `single_turn` says of `prompt`."""

    def ask(task: dict[str, Any]) -> Observation:
        question: Any
        if isinstance(prompt, str):
            question = prompt.format(**task)
        elif prompt is not None:
            question = prompt(task)
        elif "messages" in task:
            question = task["messages"]
        elif "prompt" in task:
            question = task["prompt"]
        else:
            raise InvalidEpisodeData(
                f"a task with {sorted(task)} has no 'prompt' or 'messages'; pass prompt="
            )
        if isinstance(question, Observation):
            return question
        return Observation(question) if isinstance(question, str) else Observation(messages=question)

    return ask
