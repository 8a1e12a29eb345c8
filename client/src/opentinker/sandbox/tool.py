"""The code interpreter as a tool that an environment gives to its agent.

    self.python = CodeInterpreter()                    # in reset
    observation = self.python.observe(action)          # in step: None where the action runs no code
    self.python.close()                                # in close

Whatever a model gets wrong (arguments that are no JSON, no code, code that raises or never ends) is text for
it to read. Only a machine without jails raises.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from opentinker.environments.content import Message, ToolCall
from opentinker.environments.types import Action, Observation
from opentinker.sandbox.jail import Interpreter, Jail
from opentinker.sandbox.limits import Ended, Limits, Result

MAX_CHARS = 4000

_BLOCK = re.compile(r"```(?:python|py)[ \t]*\r?\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_WHY = {
    Ended.TIMEOUT: "it ran for longer than {wall_s:g} s",
    Ended.CPU_LIMIT: "it used more than {cpu_s:g} s of CPU time",
    Ended.MEMORY_LIMIT: "it used more than {memory_mib} MiB of memory",
    Ended.PROCESS_LIMIT: "it started more than {processes} processes",
    Ended.FILE_LIMIT: "it made more than {files} files",
    Ended.OUTPUT_LIMIT: "it printed more than {output_kib} KiB",
    Ended.SIGNALLED: "a signal ended it",
    Ended.LOST: "it broke its interpreter",
    Ended.EXITED: "it ended its interpreter",
}


class CodeInterpreter:
    """Runs Python for an agent: `persistent` keeps variables from call to call, otherwise each call is a
    program of its own. Nothing is started before the first call.
    """

    def __init__(
        self,
        *,
        persistent: bool = True,
        jail: Jail | None = None,
        limits: Limits | None = None,
        name: str = "python",
        max_chars: int = MAX_CHARS,
    ) -> None:
        """MissingDependency where there can be no jail. `limits` are those of each call; `max_chars` is how
        much of an output the model is shown.
        """
        if max_chars < 200:
            raise ValueError(f"max_chars must be at least 200, not {max_chars}")
        if jail is not None and limits is not None:
            raise ValueError("limits: the jail has its own; give one of the two")
        self.name = name
        self.calls = 0
        self._jail = jail or Jail(limits)
        self._persistent = persistent
        self._max_chars = max_chars
        self._interpreter: Interpreter | None = None
        self._closed = False

    @property
    def description(self) -> str:
        """What the model is told."""
        kept = "Variables are kept between calls." if self._persistent else "Nothing is kept between calls."
        return f"Run Python code and see what it prints. {kept} There is no network."

    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI's shape, as chat templates take it."""
        code = {"type": "string", "description": "Python source text"}
        parameters = {
            "type": "object",
            "properties": {"code": code},
            "required": ["code"],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def run(self, code: str) -> Result:
        """Run code; what came of it."""
        if self._closed:
            raise RuntimeError("the code interpreter is closed")
        self.calls += 1
        if not self._persistent:
            return self._jail.run(code)
        if self._interpreter is None or not self._interpreter.alive:
            self._interpreter = self._jail.interpreter()
        return self._interpreter.exec(code)

    def call(self, arguments: str | Mapping[str, Any]) -> str:
        """The answer to a call with these arguments, as the model wrote them: text for it to read."""
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except (ValueError, RecursionError):
            return self._malformed("the arguments are no JSON")
        if not isinstance(given, dict):
            return self._malformed("the arguments are no JSON object")
        if "code" not in given:
            return self._malformed("there is no code")
        if not isinstance(given["code"], str):
            return self._malformed("code must be a string")
        unknown = sorted(set(given) - {"code"})
        if unknown:
            return self._malformed(f"there is no argument {unknown[0]!r}")
        return self.shown(self.run(given["code"]))

    def answer(self, call: ToolCall) -> Message:
        """The message that answers a tool call; one of another name is told what there is."""
        if call.name != self.name:
            text = f"Error: there is no tool {call.name[:64]!r}; there is {self.name!r}."
        else:
            text = self.call(call.arguments)
        return Message("tool", text, tool_call_id=call.id, name=self.name)

    def observe(self, action: Action) -> Observation | None:
        """What an action's tool calls, or the last ```python block of its text, came to; None if it has
        neither.
        """
        if action.tool_calls:
            return Observation(messages=[self.answer(call) for call in action.tool_calls])
        blocks = _BLOCK.findall(action.text)
        return Observation(self.shown(self.run(blocks[-1]))) if blocks else None

    def shown(self, result: Result) -> str:
        """A result as the model reads it."""
        parts = [self._cut(result.stdout), self._cut(result.stderr)]
        text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
        if result.ended is Ended.EXITED and (not self._persistent or self._lives):
            if result.exit and not result.stderr.strip():
                text = f"{text}\n(exit status {result.exit})".lstrip()
            return text or "(no output)"
        limits = self._jail.limits
        why = _WHY[result.ended].format(
            wall_s=limits.wall_s,
            cpu_s=limits.cpu_s,
            memory_mib=limits.memory_bytes >> 20,
            processes=limits.processes,
            files=limits.files,
            output_kib=limits.output_bytes >> 10,
        )
        lost = " The interpreter was restarted: its variables are gone." if self._persistent else ""
        return f"{text}\nError: the code was stopped: {why}.{lost}".lstrip()

    def close(self) -> None:
        """End it. Afterwards no process of it is left, and it runs nothing more."""
        self._closed = True
        if self._interpreter is not None:
            self._interpreter.close()

    @property
    def _lives(self) -> bool:
        return self._interpreter is not None and self._interpreter.alive

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"

    def _malformed(self, what: str) -> str:
        return f'Error: {what}. Call {self.name} with {{"code": "..."}}.'
