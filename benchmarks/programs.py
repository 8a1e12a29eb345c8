"""Programs of this package that take a step for each line, and the processes they run in."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType

START_TIMEOUT_S = 300


class Program:
    """A child process that answers each line with one line of JSON."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python -m benchmarks.<module>` and wait until it says that it is ready."""
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})},
        )
        self.first = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str = "") -> dict[str, float]:
        """What it answers to a line."""
        self.send(line)
        return self._answer()

    def send(self, line: str = "") -> None:
        """Give it work without waiting; `receive` takes the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, float]:
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._module} ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Program":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
