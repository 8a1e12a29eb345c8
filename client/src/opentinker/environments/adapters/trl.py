"""Environments written for TRL's `environment_factory`: a class whose public methods are tools.

    Shop = trl_environment(ShopEnv, [{"prompt": [...], "item": "apple"}], reward_funcs=[bought])

Neither TRL nor torch is needed. What TRL does with such a class is done here: an instance for each episode,
its methods (and `tools`) offered to the model, `reset(**row)`, whose text is added to the last message, and
at the end `get_reward()` and the reward functions, with lists of one and the instance in `environments`.
"""

import inspect
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from opentinker.environments.adapters.calling import call
from opentinker.environments.base import Task
from opentinker.environments.content import Content, Image, Message, Part, Text
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidReward
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward, RewardStatus
from opentinker.environments.single_turn import listed
from opentinker.environments.tools import Tool, ToolEnvironment
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source

_NOT_TOOLS = ("reset", "get_reward")
_OF_THE_TRAINER = ("completion_ids", "trainer_state", "log_extra")
"""What TRL gives reward functions of its own run."""

RewardFunc = Callable[..., Any]


def trl_environment(
    factory: Callable[[], Any],
    tasks: "Sequence[Task] | Source | Mapping[str, Sequence[Task] | Source] | None" = None,
    *,
    reward_funcs: RewardFunc | Sequence[RewardFunc] = (),
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    name: str = "",
    deterministic: bool = False,
) -> type[ToolEnvironment]:
    """An environment class of a TRL environment factory: a class, or a function that makes an instance.

    `tasks` are TRL's data set: a row's "prompt" is a list of messages or a text, and `reset` gets the whole
    row. A `reset` that names `seed`, which no row has, gets the episode's, so that all members of a group see
    the same. Reward functions and `get_reward` are added up with `reward_weights` (those of the functions);
    None leaves one out. Functions that ask for what only a trainer has (completion_ids, trainer_state,
    log_extra) are refused, and so are models as rewards. Say `deterministic=True` if the same row, seed and
    calls give the same episode.
    """
    given = {} if tasks is None else dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    splits: dict[str, Sequence[Task]] = {split: listed(rows, split) for split, rows in given.items()}
    probe = _made(factory)
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    weights = _weights(functions, reward_weights)
    methods = _methods(type(probe))
    if not functions and not hasattr(type(probe), "get_reward"):
        raise EnvironmentDefinitionError("trl_environment: no reward_funcs, and the class has no get_reward")
    belt = tuple(Tool(function) for function in (*tools, *methods.values()))

    class Trl(ToolEnvironment):
        tools: ClassVar[tuple[Tool, ...]] = belt
        awaits: ClassVar[bool] = True

        def __init__(self) -> None:
            self._theirs: Any = None
            self._said: list[dict[str, Any]] = []
            self._numbers: dict[str, list[float]] = {}
            self._graded = False

        async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._theirs = _made(factory)
            self._row = dict(task)
            more = {"seed": seed} if "seed" not in task and _names_seed(self._theirs) else {}
            told = await call(self._theirs.reset, **task, **more)
            self._prompt = _prompt(task, told)
            return Observation(messages=self._prompt)

        async def step(self, action: Action) -> StepResult:
            self._said.append(_assistant(action))
            result = super().step(action)
            result = await result if isinstance(result, Awaitable) else result
            if result.observation is not None:
                self._said += [_plain(message) for message in result.observation.messages]
            return result

        async def answered(self, text: str) -> StepResult:
            reward, info = await self._grade()
            return StepResult(reward=reward, terminated=True, info=info)

        async def finalize(self) -> Reward | None:
            return None if self._graded else (await self._grade())[0]

        def metrics(self) -> Mapping[str, float | Metric]:
            return {name: sum(values) / len(values) for name, values in self._numbers.items()}

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

        def _belt(self) -> dict[str, Tool]:
            own = {name: getattr(self._theirs, name) for name in methods}
            return {each.name: _Guarded(each, own.get(each.name, each)) for each in belt}

        async def _grade(self) -> tuple[Reward, dict[str, str]]:
            self._graded = True
            try:
                return await self._scored(), {}
            except Exception as error:
                told = {"grader_error": f"{type(error).__name__}: {error}"}
                return Reward.failed(RewardStatus.GRADER_ERROR), told

        async def _scored(self) -> Reward:
            parts: dict[str, float] = {}
            total: float | None = None
            for function, weight in zip(functions, weights, strict=True):
                values = await call(function, **self._asked())
                if len(values) != 1:
                    raise InvalidReward(f"{_name(function)} gave {len(values)} rewards for one completion")
                if values[0] is not None:
                    parts[_name(function)] = float(values[0])
                    total = (total or 0.0) + weight * float(values[0])
            if hasattr(self._theirs, "get_reward"):
                own = await call(self._theirs.get_reward)
                if own is not None:
                    parts[type(self._theirs).__name__] = float(own)
                    total = (total or 0.0) + float(own)
            return Reward.unscored() if total is None else Reward(total, components=parts)

        def _asked(self) -> dict[str, Any]:
            """What a reward function is called with."""
            columns = {
                name: [value] for name, value in self._row.items() if name not in ("prompt", "completion")
            }
            return {
                "prompts": [[_plain(message) for message in self._prompt]],
                "completions": [list(self._said)],
                **columns,
                "environments": [self._theirs],
                "log_metric": lambda name, value: self._numbers.setdefault(name, []).append(float(value)),
            }

    Trl.splits = tuple(splits)
    Trl.deterministic = deterministic
    Trl.__name__ = Trl.__qualname__ = name or type(probe).__name__
    Trl.__doc__ = inspect.getdoc(type(probe)) or "A TRL environment."
    return Trl


class _Guarded(Tool):
    """A tool as TRL calls it: what it raises is told to the model."""

    def __init__(self, tool: Tool, function: Callable[..., Any]) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._call = function

    @property
    def is_async(self) -> bool:
        return True

    async def __call__(self, **arguments: Any) -> Any:
        try:
            return _content(await call(self._call, **arguments))
        except Exception as error:
            return str({"error": str(error)})


def _made(factory: Callable[[], Any]) -> Any:
    if isinstance(factory, Mapping):
        raise EnvironmentDefinitionError(
            "trl_environment takes one factory: make a class of each and fit each"
        )
    made = factory()
    if not callable(getattr(made, "reset", None)):
        raise EnvironmentDefinitionError(f"{type(made).__name__} has no `reset`")
    return made


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods that are tools, by name."""
    found = inspect.getmembers(cls, predicate=inspect.isfunction)
    return {name: each for name, each in found if name not in _NOT_TOOLS and not name.startswith("_")}


def _weights(functions: Sequence[Any], given: Sequence[float] | None) -> list[float]:
    for function in functions:
        if not callable(function) or hasattr(function, "forward"):
            raise EnvironmentDefinitionError(f"reward_funcs: {function!r} is no function")
        if asks := [each for each in _OF_THE_TRAINER if each in inspect.signature(function).parameters]:
            text = f"reward_funcs: {_name(function)} asks for {asks[0]}, which only TRL's trainer has"
            raise EnvironmentDefinitionError(text)
    if given is not None and len(given) != len(functions):
        text = f"reward_weights: {len(given)} for {len(functions)} reward functions"
        raise EnvironmentDefinitionError(text)
    return [1.0] * len(functions) if given is None else [float(weight) for weight in given]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _names_seed(theirs: Any) -> bool:
    return "seed" in inspect.signature(theirs.reset).parameters


def _prompt(row: Mapping[str, Any], told: Any) -> list[Message]:
    """The row's prompt, and at the end of its last message what `reset` told."""
    prompt = row.get("prompt", [{"role": "user", "content": ""}])
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages = [Message.of({**each, "content": _content(each.get("content") or "")}) for each in given]
    if told is None:
        return messages
    last = messages[-1]
    parts = _joined([*last.content.parts, *Content.of(_content(told)).parts])
    return [*messages[:-1], Message(last.role, parts, last.tool_calls, last.tool_call_id, last.name)]


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Texts that follow each other are one, as strings that are added."""
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + part.text)
        elif part != Text(""):
            joined.append(part)
    return joined or [Text("")]


def _content(value: Any) -> Content:
    """A result of a tool, or of reset: blocks of text and images as they are, all else as text."""
    if isinstance(value, Content):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) and "type" in each for each in value):
        return Content.of(value if isinstance(value, str) else str(value))
    return Content(tuple(_part(block) for block in value))


def _part(block: Mapping[str, Any]) -> Part:
    if block["type"] == "text":
        return Text(str(block["text"]))
    if block["type"] == "image":
        image = block["image"]
        if isinstance(image, bytes):
            return Image(image)
        data = io.BytesIO()
        image.save(data, format="PNG")
        return Image(data.getvalue())
    return Text(str(dict(block)))


def _assistant(action: Action) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": action.text}
    calls = [{"type": "function", "function": each.to_dict()["function"]} for each in action.tool_calls]
    return message | ({"tool_calls": calls} if calls else {})


def _plain(message: Message) -> dict[str, Any]:
    """A message as reward functions see it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content.for_template()}
    return plain | ({"name": message.name} if message.name else {})
