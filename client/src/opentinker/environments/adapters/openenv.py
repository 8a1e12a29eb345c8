"""OpenEnv environments (extra `openenv`): a class played here, or a server that runs, over its WebSocket.

    Echo = openenv_environment(EchoEnvironment, action=EchoAction)
    Echo = openenv_environment("http://127.0.0.1:8000")

A WebSocket is a session of the server's: its HTTP routes for reset and step make an instance for each call
and are of no use for an episode.
"""

import asyncio
import inspect
import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from openenv.core.env_server.interfaces import Environment as Theirs
from openenv.core.env_server.serialization import serialize_observation
from openenv.core.generic_client import GenericEnvClient
from pydantic import ValidationError

from opentinker.environments.adapters.calling import call
from opentinker.environments.base import Environment, Task
from opentinker.environments.content import Json
from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.single_turn import listed
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source

NO_DEADLINE_S = 86_400.0
"""Of the library's client: steps have deadlines of their own."""
MAX_SEED = 2**31
_CLOSE_S = 5.0
_NOT_SAID = ("metadata",)
_CLOSING: set[asyncio.Task[None]] = set()

Parse = Callable[[str], Mapping[str, Any]]
Render = Callable[[dict[str, Any]], "str | Observation"]


class _Refused(Exception):
    """The action is none of this environment; told to the model."""


def openenv_environment(
    environment: Callable[[], Any] | str,
    *,
    action: Any = None,
    tasks: "Sequence[Task] | Source | Mapping[str, Sequence[Task] | Source] | None" = None,
    parse: Parse | None = None,
    render: Render | None = None,
    name: str = "",
    max_turns: int = 0,
    deterministic: bool = False,
) -> type[Environment]:
    """An environment class of an OpenEnv one.

    `environment` is a class or function that makes one, with its `action` class; or the URL of a server,
    which is asked for the schema of its actions. `reset` gets the seed, below 2**31, where it takes one, and
    the task as keyword arguments. `parse` makes the fields of an action of what the model says: by default
    its only text field, or else a JSON object; what is none is told to the model. `render` shows an
    observation's fields: by default its only text, or else JSON. Rewards are added up; one that is None is no
    reward. Say `deterministic=True` if the same seed and actions always give the same episode.
    """
    given = {} if tasks is None else dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    splits: dict[str, Sequence[Task]] = {split: listed(rows, split) for split, rows in given.items()}
    url = environment if isinstance(environment, str) else ""
    if bool(url) != (action is None):
        text = "give `action` with a class, and none with a URL: the server says what its actions are"
        raise EnvironmentDefinitionError(f"openenv_environment: {text}")
    schema = _schema_at(url) if url else action.model_json_schema()
    read = parse or _parser(schema)
    show = render or _shown

    class OpenEnv(Environment):
        awaits: ClassVar[bool] = True

        def __init__(self) -> None:
            self._session: _Server | _Instance | None = None

        async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._session = _Server(url) if url else _Instance(environment, action)
            payload = await self._session.reset({**task, "seed": seed % MAX_SEED})
            if payload["done"]:
                raise ValueError("the environment ended the episode in its reset")
            return _observation(show, payload)

        async def step(self, action: Action) -> StepResult:
            assert self._session is not None
            try:
                payload = await self._session.step(_fields(read, action.text))
            except _Refused as refused:
                return StepResult(f"That is no action: {refused}")
            reward = payload.get("reward")
            return StepResult(
                _observation(show, payload),
                reward=None if reward is None else float(reward),
                terminated=bool(payload.get("done")),
            )

        async def close(self) -> None:
            if self._session is not None:
                await self._session.close()

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

    OpenEnv.splits = tuple(splits)
    OpenEnv.max_turns = max_turns
    OpenEnv.deterministic = deterministic
    OpenEnv.__name__ = OpenEnv.__qualname__ = name or (
        "openenv" if url else getattr(environment, "__name__", "openenv")
    )
    OpenEnv.__doc__ = inspect.getdoc(environment) if not url else f"The OpenEnv server at {url}."
    return OpenEnv


class _Instance:
    """An environment in this process. Plain methods run in a thread."""

    def __init__(self, make: Any, action: Any) -> None:
        self._made = make()
        self._action = action

    async def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        return await self._call("reset", **_taken(self._made, "reset", given))

    async def step(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            action = self._action.model_validate(dict(fields))
        except ValidationError as error:
            raise _Refused(_problems(error)) from None
        return await self._call("step", action)

    async def close(self) -> None:
        await call(self._made.close)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Their own `async` form, where there is one, is the plain one on the event loop.
        own = getattr(type(self._made), f"{name}_async") is not getattr(Theirs, f"{name}_async")
        method = getattr(self._made, f"{name}_async" if own else name)
        observation = await call(method, *args, **kwargs)
        payload: dict[str, Any] = serialize_observation(observation)
        return payload


class _Server:
    """A session with a server."""

    def __init__(self, url: str) -> None:
        self._client = GenericEnvClient(base_url=url, message_timeout_s=NO_DEADLINE_S, mode="simulation")

    async def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        async def connected() -> Any:
            await self._client.connect()
            return await self._client.reset(**given)

        return await self._guarded(connected)

    async def step(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._guarded(lambda: self._client.step(dict(fields)))
        except RuntimeError as error:
            # The only trace of the server's code that the library leaves.
            if "VALIDATION_ERROR" in str(error):
                raise _Refused(str(error)) from None
            raise

    async def close(self) -> None:
        async with asyncio.timeout(_CLOSE_S):
            await self._client.close()

    async def _guarded(self, ask: Callable[[], Any]) -> dict[str, Any]:
        try:
            result = await ask()
        except RuntimeError:
            raise
        except BaseException:
            # A deadline, or a connection that broke: nobody will close it.
            task = asyncio.get_running_loop().create_task(self._client.close())
            _CLOSING.add(task)
            task.add_done_callback(_CLOSING.discard)
            raise
        return {"observation": result.observation, "reward": result.reward, "done": result.done}


def _taken(made: Any, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a method: without the seed where it takes none."""
    parameters = inspect.signature(getattr(made, method)).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if takes_all or "seed" in parameters:
        return dict(given)
    return {name: value for name, value in given.items() if name != "seed"}


def _fields(read: Parse, text: str) -> Mapping[str, Any]:
    try:
        return read(text)
    except (ValueError, TypeError, KeyError) as error:
        raise _Refused(str(error)) from None


def _parser(schema: Mapping[str, Any]) -> Parse:
    """What a model says as the fields of an action."""
    fields = {name: each for name, each in schema.get("properties", {}).items() if name not in _NOT_SAID}
    if len(fields) == 1:
        ((name, only),) = fields.items()
        if only.get("type") == "string":
            return lambda text: {name: text}

    def parse(text: str) -> dict[str, Any]:
        fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"say a JSON object with {', '.join(fields) or 'no fields'}")
        return value

    return parse


def _shown(fields: dict[str, Any]) -> str:
    said = list(fields.values())
    if len(said) == 1 and isinstance(said[0], str):
        return said[0]
    return json.dumps(fields, ensure_ascii=False, default=str)


def _observation(show: Render, payload: Mapping[str, Any]) -> Observation:
    shown = show(dict(payload["observation"]))
    return Observation(shown) if isinstance(shown, str | Json) else shown


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'action'}: {each['msg']}" for each in error.errors()
    )


def _schema_at(url: str) -> dict[str, Any]:
    """The schema of a server's actions. EnvironmentDefinitionError."""
    where = re.sub(r"^ws", "http", url.rstrip("/")) + "/schema"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(where, timeout=30.0) as answer:
            schema: dict[str, Any] = json.loads(answer.read())["action"]
            return schema
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentDefinitionError(f"no OpenEnv server tells its actions at {where}: {error}") from None
