"""Runs code that nobody trusts: a program once, or an interpreter that keeps its variables."""

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from opentinker.sandbox import command
from opentinker.sandbox.errors import InterpreterEnded
from opentinker.sandbox.limits import Ended, Limits, Result
from opentinker.sandbox.process import JailProcess

Data = str | bytes

_DONE = re.compile(rb"done (\d{1,9}) (\d{1,3}) (\d{1,15}) (\d{1,18})")
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What jails on this machine are made of."""

    mode: command.Mode
    bubblewrap: str
    """Its version."""
    python: str
    """The interpreter inside."""


class Jail:
    """How code is run. Each run is a jail of its own; nothing is kept between them.

    Code is Python. It sees /usr, the interpreter, the folders `packages` (read-only, searched for modules)
    and an empty working folder; there is no network. Calls block: in an async environment use
    `asyncio.to_thread`. From any number of threads.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | os.PathLike[str] | None = None,
        packages: tuple[str | os.PathLike[str], ...] = (),
    ) -> None:
        """MissingDependency where there can be no jail. `python`: by default ours, or the system's where
        jailed users cannot read ours.
        """
        self.limits = limits or Limits()
        self._python = command.find_python(Path(python) if python is not None else None)
        self._packages = tuple(Path(os.path.abspath(folder)) for folder in packages)
        for folder in self._packages:
            if not folder.is_dir() or not command.reachable(folder):
                raise ValueError(f"packages: {folder} is no folder that jailed users can read")

    @property
    def capabilities(self) -> Capabilities:
        """What it is made of."""
        return Capabilities(command.host().mode, command.version(), str(self._python))

    def run(
        self,
        code: str,
        *,
        stdin: Data = b"",
        files: Mapping[str, Data] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Run a program to its end. `files` are put into its working folder."""
        limits = limits or self.limits
        process = self.start("once", limits, code=_source(code), files=files)
        try:
            began = time.monotonic()
            process.feed(_bytes(stdin, "stdin"))
            process.pump(limits.wall_s)
            return _result(process, time.monotonic() - began)
        finally:
            process.kill()

    def interpreter(
        self, *, files: Mapping[str, Data] | None = None, limits: Limits | None = None
    ) -> "Interpreter":
        """An interpreter that runs one piece of code after the other in one namespace."""
        limits = limits or self.limits
        process = self.start("session", limits, files=files)
        process.feed(b"")
        return Interpreter(process, limits)

    def start(
        self, mode: str, limits: Limits, *, files: Mapping[str, Data] | None = None, **request: Any
    ) -> JailProcess:
        """A jail that was told what to do; `mode` is one of the keeper's."""
        given = _files(files or {}, limits)
        process = JailProcess(self._python, self._packages, limits)
        told: dict[str, Any] = {
            "cpu_s": float(limits.cpu_s),
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
            "disk_bytes": limits.disk_bytes,
            "open_files": limits.open_files,
            # The folders themselves and what was put there do not count.
            "files": limits.files + len(given) + 16,
        }
        paths = command.package_folders(len(self._packages))
        process.send({"mode": mode, "limits": told, "files": given, "paths": paths, **request})
        return process


class Interpreter:
    """A jailed interpreter. Use it as a context manager, or `close` it.

    A piece of code that breaks a limit takes the interpreter with it: `alive` is false then. One exec at a
    time; others wait.
    """

    def __init__(self, process: JailProcess, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._turn = threading.Lock()
        self._number = 0

    @property
    def alive(self) -> bool:
        """It takes another piece of code."""
        return self._process.alive

    @property
    def pid(self) -> int:
        """Of the jail, for tests and logs."""
        return self._process.pid

    def exec(self, code: str, *, wall_s: float | None = None) -> Result:
        """Run a piece of code; the value of a last expression is printed, as at a prompt.

        `exit` is 1 where it raised. InterpreterEnded if an earlier one ended the interpreter.
        """
        limits = self._limits if wall_s is None else replace(self._limits, wall_s=wall_s)
        source = _source(code)
        with self._turn:
            process = self._process
            if not process.alive:
                raise InterpreterEnded(
                    f"the interpreter has ended ({process.ended}), and its variables with it"
                )
            process.stdout.clear()
            process.stderr.clear()
            began = time.monotonic()
            self._number += 1
            done: list[tuple[int, float, int]] = []

            def take(frame: bytes) -> bool:
                words = _DONE.fullmatch(frame)
                if words is not None and int(words[1]) == self._number:
                    done.append((int(words[2]), int(words[3]) * 1e-6, int(words[4])))
                return bool(done)

            process.send({"code": source, "cpu_s": float(limits.cpu_s), "number": self._number})
            gone = process.pump(limits.wall_s, take)
            wall_s = time.monotonic() - began
            if gone:
                return _result(process, wall_s)
            status, cpu_s, peak_bytes = done[0]
            return Result(
                _text(process.stdout), _text(process.stderr), status, Ended.EXITED, wall_s, cpu_s, peak_bytes
            )

    def close(self) -> None:
        """End it, also while another thread is in `exec`. Afterwards no process of it is left."""
        self._process.interrupt()
        with self._turn:
            self._process.kill()

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()


def _result(process: JailProcess, wall_s: float) -> Result:
    ended = process.ended or Ended.LOST
    most = process.limits.output_bytes
    stdout, stderr = process.stdout[:most], process.stderr[:most]
    return Result(
        _text(stdout), _text(stderr), process.exit, ended, wall_s, process.cpu_s, process.peak_bytes
    )


def _text(data: bytearray) -> str:
    return data.decode("utf-8", errors="replace")


def _source(code: str) -> str:
    if not isinstance(code, str):
        raise TypeError(f"code must be str, not {type(code).__name__}")
    # Half a surrogate pair, which JSON can spell, is no text that a compiler takes.
    return code.encode("utf-8", errors="replace").decode()


def _bytes(data: Data, what: str) -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8", errors="replace")
    if not isinstance(data, bytes):
        raise TypeError(f"{what} must be str or bytes, not {type(data).__name__}")
    return data


def _files(files: Mapping[str, Data], limits: Limits) -> dict[str, bytes]:
    given = {}
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"files: {name!r} must be a relative path without ..")
        given[str(path)] = _bytes(data, f"files[{name!r}]")
    size = sum(-(-len(data) // _PAGE) * _PAGE for data in given.values())
    if size > limits.disk_bytes // 2 or len(given) > limits.files // 2:
        raise ValueError(f"files: {size} bytes in {len(given)} are more than half of what the jail may hold")
    return given
