"""An environment on an MCP server."""

import sys
from pathlib import Path
from typing import Any

from opentinker.environments.adapters.mcp import McpServer, McpSession, mcp_environment

SERVER = McpServer.program(sys.executable, "-I", str(Path(__file__).with_name("mcp_tiny_server.py")))
TASKS = {"train": [{"prompt": "2 + 3?", "answer": "5"}]}


async def right(answer: str, task: dict[str, Any], session: McpSession) -> float:
    """Whether the server says so too."""
    return float((await session.call("add", {"a": 2, "b": 3})).text == answer)


Sums = mcp_environment(SERVER, TASKS, reward=right, deterministic=True)
