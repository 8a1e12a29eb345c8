"""reasoning-gym's tasks (extra `reasoning-gym`): a question, an answer, and the task's own scoring.

Sums = reasoning_gym_environment("chain_sum", size=1000, max_terms=4)
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, overload

from opentinker.environments.adapters.libraries import library, plain
from opentinker.environments.adapters.randomness import OwnRandomness
from opentinker.environments.base import Environment, Task
from opentinker.environments.content import Message
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.rewards import Reward, RewardStatus
from opentinker.environments.types import Action, Observation, StepResult

SPLITS = ("train", "test")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_environment(
    dataset: str,
    *,
    size: int = 1000,
    test_size: int = 100,
    seed: int = 0,
    instructions: str = "",
    answer: Callable[[str], str] | None = None,
    name: str = "",
    **config: Any,
) -> type[Environment]:
    """An environment class of a data set; `config` is its configuration.

    The split "train" has `size` tasks and "test" `test_size` others, all drawn from `seed`. An episode
    without a task draws one of the training tasks by its own seed. `answer` finds the answer in what was
    said: by default what stands in the last <answer> tags, or else all of it. The data set's function
    scores it, from 0 to 1; if that fails the episode has no reward (GRADER_ERROR).
    """
    reasoning_gym = library("reasoning_gym", "reasoning-gym")
    if size < 1 or test_size < 0:
        raise EnvironmentDefinitionError(
            "reasoning_gym_environment: size is at least 1, test_size at least 0"
        )
    try:
        with OwnRandomness(0)():
            # One data set: each task has a seed of its own, so that the tests are none of the training's.
            data = reasoning_gym.create_dataset(dataset, seed=seed, size=size + test_size, **config)
    except Exception as error:
        raise EnvironmentDefinitionError(f"reasoning_gym_environment({dataset!r}): {error}") from error
    splits = {"train": _Indices(0, size), "test": _Indices(size, test_size)}
    read = answer or _answer

    def entry_of(index: int) -> dict[str, Any]:
        with OwnRandomness(seed + index)():
            entry: dict[str, Any] = data[index]
            return entry

    class ReasoningGym(Environment):
        max_turns: ClassVar[int] = 1

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split) or None

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            index = task["index"] if task else seed % size
            if not isinstance(index, int) or not 0 <= index < size + test_size:
                raise InvalidEpisodeData(f"task: index is {index!r}, of {size + test_size} tasks")
            self._entry = entry_of(index)
            question = Message("user", self._entry["question"])
            before = [Message("system", instructions)] if instructions else []
            return Observation(messages=[*before, question], info={"index": index})

        def step(self, action: Action) -> StepResult:
            given = read(action.text)
            info = {"given": given, "answer": plain(self._entry["answer"])}
            try:
                with OwnRandomness(0)():
                    reward = Reward(data.score_answer(given, self._entry))
            except Exception as error:
                reward = Reward.failed(RewardStatus.GRADER_ERROR)
                info["grader_error"] = f"{type(error).__name__}: {error}"
            return StepResult(reward=reward, terminated=True, info=info)

    ReasoningGym.splits = SPLITS if test_size else SPLITS[:1]
    ReasoningGym.__name__ = ReasoningGym.__qualname__ = name or dataset
    ReasoningGym.__doc__ = f"reasoning-gym's {dataset}."
    return ReasoningGym


class _Indices(Sequence[Task]):
    """Tasks that say only which they are: the question is made when it is asked."""

    def __init__(self, start: int, size: int) -> None:
        self._range = range(start, start + size)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [{"index": each} for each in self._range[index]]
        return {"index": self._range[index]}

    def __iter__(self) -> Iterator[Task]:
        return ({"index": each} for each in self._range)


def _answer(text: str) -> str:
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()
