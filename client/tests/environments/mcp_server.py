"""An MCP server for tests: `python mcp_server.py`, or with a port over streamable HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
NOTES: list[str] = []
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000000000200015e5d"
    "0a2d0000000049454e44ae426082"
)


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keeps a note."""
    NOTES.append(text)
    return f"{len(NOTES)} kept"


@server.tool()
def notes() -> list[str]:
    """All notes."""
    return NOTES


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no such page")


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=PIXEL, format="png")


@server.tool()
def whoami() -> str:
    """The process, and what of its environment is ours."""
    return f"{os.getpid()} {os.environ.get('GREETING', '')} {os.environ.get('SECRET', '')}"


@server.tool()
def die() -> str:
    """Ends the process."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
