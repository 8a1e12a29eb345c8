"""An MCP server in a few lines, without the library: it starts in no time. Lines of JSON-RPC on its pipes."""

import json
import os
import sys

TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    {"name": "die", "description": "Ends the process.", "inputSchema": {"type": "object"}},
]


def answer(method: str, params: dict) -> dict | None:  # type: ignore[type-arg]
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "tiny", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        if params["name"] == "die":
            os._exit(3)
        total = params["arguments"]["a"] + params["arguments"]["b"]
        return {"content": [{"type": "text", "text": str(total)}]}
    return None


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = answer(message["method"], message.get("params") or {})
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    reply |= (
        {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
    )
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
