"""MCP servers as tools (extra `mcp`).

Files = mcp_environment(
    McpServer.program("python", "server.py"), {"train": [{"prompt": "...", "answer": "..."}]}, reward=grade
)
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jsonschema
from referencing import Registry

from opentinker.environments.adapters.calling import call
from opentinker.environments.adapters.mcp_session import McpServer, McpSession, ServerLost, list_tools
from opentinker.environments.base import Task
from opentinker.environments.content import Content
from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.rewards import Reward, RewardStatus
from opentinker.environments.single_turn import Prompt, asker, listed
from opentinker.environments.tools import Tool, ToolEnvironment, ToolError
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source

LIST_TIMEOUT_S = 60.0
Scored = Reward | float | None
RewardFunction = Callable[[str, dict[str, Any], McpSession], "Scored | Awaitable[Scored]"]
"""Of the answer, the task and the episode's session with the server, all of whose tools it may call."""
Prepare = Callable[[McpSession, dict[str, Any], int], "Awaitable[None]"]

__all__ = ["McpServer", "McpSession", "ServerLost", "mcp_environment"]


def mcp_environment(
    server: McpServer,
    tasks: "Sequence[Task] | Source | Mapping[str, Sequence[Task] | Source]",
    *,
    reward: RewardFunction,
    prompt: Prompt | None = None,
    allowed: Sequence[str] | None = None,
    prepare: Prepare | None = None,
    name: str = "mcp",
    deterministic: bool = False,
) -> type[ToolEnvironment]:
    """An environment class whose tools are those of an MCP server, which is asked for them now.

    Each episode is a session of its own: a program is started, a URL is connected to. `tasks` and `prompt`
    are as in `single_turn`. The model calls tools as often as it likes and then answers; `reward(answer,
    task, session)`, plain or async, grades what came of it ("" where a limit ended the episode before an
    answer). `allowed` names the tools that the model may call, by default all; the others are hidden from it,
    and `prepare(session, task, seed)` and `reward` may still call them.

    Arguments that do not fit a tool's schema and errors that a tool reports are told to the model. A server
    that dies ends the episode as ENV_CRASH; a tool that takes too long meets the deadline of the step. Say
    `deterministic=True` if the same calls always give the same results.
    """
    given = dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    splits: dict[str, Sequence[Task]] = {split: listed(rows, split) for split, rows in given.items()}
    ask = asker(prompt)
    belt = _belt(server, allowed)

    class Mcp(ToolEnvironment):
        tools: ClassVar[tuple[Tool, ...]] = belt
        awaits: ClassVar[bool] = True

        def __init__(self) -> None:
            self._session: McpSession | None = None
            self._graded = False

        async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._task = task
            # Made here: a session belongs to the event loop that plays the episode.
            self._session = McpSession(server)
            await self._session.open()
            try:
                if prepare is not None:
                    await prepare(self._session, task, seed)
                return ask(task)
            except BaseException:
                self._session.abandon()
                raise

        async def step(self, action: Action) -> StepResult:
            result = super().step(action)
            return await result if isinstance(result, Awaitable) else result

        async def answered(self, text: str) -> StepResult:
            value, info = await self._grade(text)
            return StepResult(reward=value, terminated=True, info=info)

        async def finalize(self) -> Reward | None:
            return None if self._graded else (await self._grade(""))[0]

        async def _grade(self, answer: str) -> tuple[Reward, dict[str, str]]:
            assert self._session is not None
            self._graded = True
            # Before grading: what a dead server was to have done is not the model's failure.
            await self._session.check()
            try:
                return Reward.of(await call(reward, answer, self._task, self._session)), {}
            except ServerLost:
                raise
            except Exception as error:
                told = {"grader_error": f"{type(error).__name__}: {error}"}
                return Reward.failed(RewardStatus.GRADER_ERROR), told

        async def close(self) -> None:
            if self._session is not None:
                await self._session.close()

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

        def _belt(self) -> dict[str, Tool]:
            return {each.name: each.bound(self._session) for each in belt}

    Mcp.splits = tuple(splits)
    Mcp.deterministic = deterministic
    Mcp.__name__ = Mcp.__qualname__ = name
    Mcp.__doc__ = f"Tools of an MCP server: {', '.join(each.name for each in belt)}."
    return Mcp


class McpTool(Tool):
    """A tool of a server; `bound` to the session of an episode it can be called."""

    def __init__(
        self, name: str, description: str, parameters: dict[str, Any], session: McpSession | None = None
    ) -> None:
        self.name = name
        self.description = description
        self.parameters = parameters
        self._session = session

    @property
    def is_async(self) -> bool:
        return True

    def bound(self, session: McpSession | None) -> "McpTool":
        """The same tool in an episode."""
        return McpTool(self.name, self.description, self.parameters, session)

    def read(self, arguments: str) -> dict[str, Any]:
        given = self._object(arguments)
        # A registry of its own: what a schema refers to is not fetched from anywhere.
        validator = jsonschema.Draft202012Validator(self.parameters, registry=Registry())
        problem = jsonschema.exceptions.best_match(validator.iter_errors(given))
        if problem is not None:
            raise ToolError(
                f"{self.name}: {problem.json_path.replace('$', 'arguments', 1)}: {problem.message}"
            )
        return given

    async def __call__(self, **arguments: Any) -> Content:
        if self._session is None:
            raise RuntimeError(f"{self.name} is called without an episode")
        return await self._session.call(self.name, arguments)


def _belt(server: McpServer, allowed: Sequence[str] | None) -> tuple[McpTool, ...]:
    """The tools that the model gets. EnvironmentDefinitionError if the server lacks one that is allowed."""
    known = {tool.name: tool for tool in _list_now(server)}
    if missing := sorted(set(allowed or ()) - set(known)):
        text = f"allowed: the server has no tool {missing[0]!r}; its tools: {', '.join(known) or 'none'}"
        raise EnvironmentDefinitionError(text)
    belt = []
    for name in known if allowed is None else allowed:
        tool = known[name]
        schema = tool.input_schema or {"type": "object"}
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise EnvironmentDefinitionError(f"the schema of {name} is none: {error.message}") from None
        belt.append(McpTool(name, tool.description or "", dict(schema)))
    return tuple(belt)


def _list_now(server: McpServer) -> list[Any]:
    """From whatever thread a class is defined in, whether an event loop runs there or not."""
    outcome: list[Any] = []

    async def listing() -> list[Any]:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            return await list_tools(server)

    def work() -> None:
        try:
            outcome.append(asyncio.run(listing()))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="MCP tools")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        text = f"the tools of {server.url or server.command} cannot be listed: {outcome[0]}"
        raise EnvironmentDefinitionError(text) from outcome[0]
    found: list[Any] = outcome[0]
    return found
