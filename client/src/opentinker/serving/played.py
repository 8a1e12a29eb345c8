"""An environment played by a model that is served anywhere behind OpenAI's API.

    played = ot.play(GuessNumber, base_url=deployment.url, api_key=cluster.api_key, model=deployment.name)

The class is the one that `fit` and `evaluate` take, and with the same seed the episodes are those that
`evaluate` plays. Nothing is recorded to train on (`record_episode` does that): what comes back is what was
said and scored.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentinker import errors
from opentinker.environments.base import Task
from opentinker.environments.content import Array, Content, Image, Message, ToolCall
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward
from opentinker.environments.session import EnvironmentSession, end_reason_of
from opentinker.environments.sources import EnvironmentSource, EnvironmentSpec, environment_source
from opentinker.environments.types import AGENT, Action, EndReason
from opentinker.sampling import identity
from opentinker.sampling.params import SamplingParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TIMEOUT_S = 330.0
"""Of one reply: a gateway waits five minutes for a model to be served."""
RETRIES = 5
DRAWN_TASKS = 64
"""How many episodes are played where the environment has no list of tasks, as in `evaluate`."""
_OPENAI = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty")
_BEYOND = ("top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """What came of one episode."""

    seed: int
    task: Mapping[str, Any]
    reward: Reward
    end_reason: EndReason
    messages: tuple[Message, ...] = field(repr=False)
    metrics: Mapping[str, float | Metric] = field(default_factory=dict)
    error: str = ""
    """What failed, where something did."""

    @property
    def counts(self) -> bool:
        """Whether its reward may be used: it has one, and not the infrastructure ended it."""
        return self.end_reason.trainable and self.reward.is_valid


def play(env: EnvironmentSpec, *, base_url: str, model: str, **options: Any) -> list[PlayedEpisode]:
    """Play episodes and block until they have ended. Options as `play_async`."""
    if not isinstance(env, type):
        raise errors.invalid("env", "give the environment's class; a source is played by play_async")
    # In a thread of its own, because there may be an event loop in this one, as in a notebook.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(
            lambda: asyncio.run(play_async(env, base_url=base_url, model=model, **options))
        ).result()


async def play_async(
    env: "EnvironmentSpec | EnvironmentSource",
    *,
    base_url: str,
    model: str,
    api_key: str = "none",
    episodes: int | None = None,
    split: str = "test",
    seed: int = 0,
    env_options: Mapping[str, Any] | None = None,
    sampling: SamplingParams | None = None,
    max_turns: int | None = None,
    wall_clock_s: float | None = None,
    concurrency: int = 16,
) -> list[PlayedEpisode]:
    """Play the tasks of a split, in their order, or those that the environment draws from `seed`.

    `env` is a class, or a source of episodes on an env_host (`environments.environment_source`). `episodes`:
    how many; by default all tasks, or 64. `max_turns` ends an episode as TURN_LIMIT, which counts;
    `wall_clock_s` as EPISODE_TIMEOUT, which does not. Needs the package `openai`.
    """
    for name, value in {"episodes": episodes, "max_turns": max_turns, "concurrency": concurrency}.items():
        if value is not None and value < 1:
            raise errors.invalid(name, f"must be at least 1, not {value}")
    asked = _asked(sampling or SamplingParams())
    source = await environment_source(env, env_options) if isinstance(env, str | type) else env
    if tuple(source.info.agents) != (AGENT,):
        raise errors.invalid("env", f"{source.info.name} has several agents; one model plays one")
    tasks = await source.tasks(split)
    if tasks is not None and not len(tasks):
        raise errors.invalid("split", f"{source.info.name} has no task in split {split!r}")
    number = episodes or (DRAWN_TASKS if tasks is None else len(tasks))
    seats = asyncio.Semaphore(concurrency)
    async with _client(base_url, api_key) as client:
        speaker = _Speaker(client, model, asked, source.info.tools)

        async def one(ordinal: int) -> PlayedEpisode:
            async with seats:
                task: Task = {} if tasks is None else tasks[ordinal % len(tasks)]
                return await _Episode(speaker, identity.seed(seed, "held-out"), ordinal, task).play(
                    source, max_turns, wall_clock_s
                )

        played = await asyncio.gather(*(one(ordinal) for ordinal in range(number)))
    if source is not env:
        await source.close()
    return played


class _Speaker:
    """The model: asked for one reply after the other."""

    def __init__(
        self, client: "AsyncOpenAI", model: str, asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self._client: Any = client
        self._asked = {"model": model, **asked} | ({"tools": list(tools)} if tools else {})

    async def speak(self, messages: Sequence[Message], seed: int) -> Action:
        """Its move. What `openai` raises once it has tried often enough."""
        spoken = [openai_message(message) for message in messages]
        reply = await self._client.chat.completions.create(messages=spoken, seed=seed, **self._asked)
        said = reply.choices[0].message
        calls = [
            ToolCall(call.function.name, call.function.arguments, call.id)
            for call in said.tool_calls or ()
            if call.type == "function"
        ]
        return Action(said.content or "", tuple(calls))


class _Episode:
    """One episode and its conversation."""

    def __init__(self, speaker: _Speaker, seed: int, ordinal: int, task: Task) -> None:
        self._speaker = speaker
        self._seed = seed
        self._ordinal = ordinal
        self._task = task
        self._messages: list[Message] = []

    async def play(
        self, source: EnvironmentSource, max_turns: int | None, wall_clock_s: float | None
    ) -> PlayedEpisode:
        """Play it to its end."""
        env_seed = identity.seed(self._seed, "environment", self._ordinal)
        (session,) = await source.open_group(task=self._task, seed=env_seed, size=1)
        reward, metrics, problem = Reward.unscored(), dict[str, float | Metric](), ""
        try:
            async with asyncio.timeout(wall_clock_s):
                end, problem = await self._turns(session, max_turns)
                if end.trainable:
                    result = await session.finalize()
                    reward, metrics = result.reward, dict(result.metrics)
        except errors.OpenTinkerError as error:
            known = end_reason_of(error)
            if known is None and not isinstance(error, errors.Unavailable | errors.DeadlineExceeded):
                raise
            end, problem = known or EndReason.SANDBOX_LOST, str(error)
        except TimeoutError:
            end = EndReason.EPISODE_TIMEOUT
        finally:
            await session.close()
        return PlayedEpisode(env_seed, self._task, reward, end, tuple(self._messages), metrics, problem)

    async def _turns(self, session: EnvironmentSession, max_turns: int | None) -> tuple[EndReason, str]:
        import openai

        self._messages += (await session.begin()).as_messages()
        turn = 0
        while max_turns is None or turn < max_turns:
            try:
                seed = identity.seed(self._seed, "sampling", self._ordinal, turn)
                action = await self._speaker.speak(self._messages, seed)
            except openai.BadRequestError as error:
                if error.code != "context_length_exceeded" or not turn:
                    raise
                return EndReason.TOKEN_LIMIT, str(error)
            except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError) as error:
                # The model was not there: that is nothing the model did.
                return EndReason.CANCELLED, str(error)
            self._messages.append(Message("assistant", action.text, action.tool_calls))
            turn += 1
            result = await session.step(action, turn)
            if result.observation is not None:
                self._messages += result.observation.as_messages()
            if result.done:
                return EndReason.TERMINATED if result.terminated else EndReason.TRUNCATED, ""
        return EndReason.TURN_LIMIT, ""


def openai_message(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API takes it."""
    told: dict[str, Any] = {"role": message.role, "content": _content(message.content)}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id or f"call-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(message.tool_calls, start=1)
        ]
    if message.role == "tool":
        told["tool_call_id"] = message.tool_call_id
    elif message.name:
        told["name"] = message.name
    return told


def _content(content: Content) -> str | list[dict[str, Any]]:
    if not content.images:
        return content.text
    parts: list[dict[str, Any]] = []
    for part in content.parts:
        if isinstance(part, Array):
            raise errors.unsupported("observation", "an array has no place in OpenAI's messages")
        if isinstance(part, Image):
            url = f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _asked(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling as options of a request. UnsupportedOption for what OpenAI's API has no place for."""
    default = SamplingParams()
    known = (*_OPENAI, *_BEYOND, "stop", "ignore_eos")
    for name in SamplingParams.__slots__:
        if name not in known and getattr(sampling, name) != getattr(default, name):
            raise errors.unsupported(f"sampling.{name}", f"only {', '.join(known)} can be asked for here")
    given = {name: value for name in _OPENAI if (value := getattr(sampling, name)) is not None}
    beyond = {name: value for name in _BEYOND if (value := getattr(sampling, name)) is not None}
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    if sampling.ignore_eos:
        beyond["ignore_eos"] = True
    return given | ({"extra_body": beyond} if beyond else {})


def _client(base_url: str, api_key: str) -> "AsyncOpenAI":
    try:
        import openai
    except ImportError:
        text = "ot.play needs the package openai: pip install 'opentinker[agents]'"
        raise errors.FailedPrecondition(text, reason=errors.Reason.MISSING_DEPENDENCY) from None
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_S, max_retries=RETRIES)
