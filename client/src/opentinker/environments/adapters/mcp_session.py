"""Sessions with MCP servers: one for each episode, held by a task of its own.

The library's scopes must be left by the task that entered them, and the calls of an episode come from many.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from opentinker.environments.content import IMAGE_TYPES, Content, Image, Json, Part, Text
from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.tools import ToolError

CLOSE_TIMEOUT_S = 10.0
_MODELS_FAULT = (mcp_types.INVALID_PARAMS, mcp_types.METHOD_NOT_FOUND)

_HOLDING: set[asyncio.Task[None]] = set()
"""Sessions that are open or closing; a task that nobody holds may vanish."""


class ServerLost(Exception):
    """The server cannot be reached any more, or broke its protocol."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server: a program that is started for each episode and spoken to over its pipes, or the URL of
    one that runs and speaks streamable HTTP. Made by `program` and `at`.
    """

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    mode: str = "auto"

    @classmethod
    def program(
        cls, *command: str, env: Mapping[str, str] | None = None, folder: str = "", mode: str = "auto"
    ) -> "McpServer":
        """A program: it gets PATH, HOME and the like, and `env`; it runs in `folder`."""
        if not command:
            raise EnvironmentDefinitionError("McpServer.program needs a command")
        return cls(command=command, env=dict(env or {}), folder=folder, mode=mode)

    @classmethod
    def at(cls, url: str, *, headers: Mapping[str, str] | None = None, mode: str = "auto") -> "McpServer":
        """A server that runs. With `mode="legacy"` an episode is a session of the server's, as before
        revision 2026-07-28 of the protocol, which has none.
        """
        return cls(url=url, headers=dict(headers or {}), mode=mode)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A client of it; a program ends with the context."""
        if self.command:
            program, *arguments = self.command
            parameters = StdioServerParameters(
                command=program, args=arguments, env=dict(self.env), cwd=self.folder or None
            )
            async with Client(parameters, mode=self.mode, cache=None) as client:
                yield client
            return
        # Steps have deadlines; the library's own would be a second one that nobody set.
        async with httpx2.AsyncClient(headers=self.headers, timeout=None, trust_env=False) as http:
            transport = streamable_http_client(self.url, http_client=http)
            async with Client(transport, mode=self.mode, cache=None) as client:
                yield client


class McpSession:
    """One session with a server."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: Client | None = None
        self._leave = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect. ServerLost if that fails."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name="MCP session")
        _HOLDING.add(self._holder)
        self._holder.add_done_callback(_HOLDING.discard)
        try:
            await asyncio.shield(ready)
        except asyncio.CancelledError:
            self._holder.cancel()
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """What a tool says. ToolError for what it says is wrong; ServerLost."""
        async with self._guarded() as client:
            result = await client.call_tool(name, dict(arguments))
        content = _content(result)
        if result.is_error:
            raise ToolError(content.text if content.is_text else "the tool failed")
        return content

    async def check(self) -> None:
        """ServerLost unless the server still answers."""
        async with self._guarded() as client:
            await client.list_tools()

    def abandon(self) -> None:
        """Leave; nobody waits for it."""
        self._leave.set()

    async def close(self) -> None:
        """Leave, and wait until a program has ended."""
        self.abandon()
        if self._holder is not None:
            await asyncio.wait([self._holder], timeout=CLOSE_TIMEOUT_S)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._server.connect() as client:
                self._client = client
                ready.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            self._leave.set()
            if not ready.done():
                ready.set_exception(ServerLost(f"no session with the MCP server: {_said(error)}"))
                ready.exception()  # who waited may be gone
            if isinstance(error, asyncio.CancelledError):
                raise

    @contextlib.asynccontextmanager
    async def _guarded(self) -> AsyncIterator[Client]:
        if self._client is None or self._leave.is_set():
            raise ServerLost("the session with the MCP server is over")
        try:
            yield self._client
        except MCPError as error:
            if error.code in _MODELS_FAULT:
                raise ToolError(error.message) from None
            self.abandon()
            raise ServerLost(f"the MCP server is lost: {error.message} ({error.code})") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError, OSError) as error:
            self.abandon()
            raise ServerLost(f"the MCP server is lost: {_said(error)}") from error
        except ToolError:
            raise
        except BaseException:
            # A deadline, or a reply that is no MCP: nothing may be left running.
            self.abandon()
            raise


async def list_tools(server: McpServer) -> list[mcp_types.Tool]:
    """Every tool of a server, by a session of its own."""
    found: list[mcp_types.Tool] = []
    cursor: str | None = None
    async with server.connect() as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found


def _content(result: mcp_types.CallToolResult) -> Content:
    """What a tool says, for a model: its text and images, or else its structured result."""
    parts: list[Part] = []
    for block in result.content:
        if isinstance(block, mcp_types.TextContent):
            parts.append(Text(block.text))
        elif isinstance(block, mcp_types.ImageContent) and block.mime_type in IMAGE_TYPES:
            parts.append(Image(base64.b64decode(block.data), block.mime_type))
        else:
            parts.append(Json(block.model_dump_json(exclude_none=True, by_alias=True)))
    if not parts and result.structured_content is not None:
        parts.append(Json.of(result.structured_content))
    return Content(tuple(parts))


def _said(error: BaseException) -> str:
    """What went wrong, in the words of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
