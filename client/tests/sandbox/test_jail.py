"""Programs in a jail: what goes in and comes out, limits, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client.tests.sandbox.conftest import BRIEF, survivors

import opentinker
from opentinker.errors import MissingDependency
from opentinker.sandbox import CodeInterpreter, Ended, Grader, Jail, Limits, Mode, command

PACKAGE = Path(opentinker.__file__).parent


def test_a_program_has_input_files_output_and_status(jail: Jail) -> None:
    code = """
import sys
print(input().upper(), open("notes/a.txt").read(), __name__, sys.argv)
print("bad", file=sys.stderr)
raise SystemExit(3)
"""
    result = jail.run(code, stdin="hello\n", files={"notes/a.txt": "text"})
    assert result.stdout == "HELLO text __main__ ['<code>']\n"
    assert (result.stderr, result.exit, result.ended) == ("bad\n", 3, Ended.EXITED)
    assert not result.ok
    assert 0 < result.cpu_s < 10
    assert 1 << 20 < result.peak_bytes < 100 << 20


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("1/0", 1, 'File "<code>", line 1, in <module>\nZeroDivisionError: division by zero\n'),
        ("print('unfinished", 1, "SyntaxError"),
        ("exit()", 0, ""),
        ("exit('no')", 1, "no\n"),
        ("import sys; sys.exit(True)", 1, ""),
        ("import os; os._exit(7)", 7, ""),
        ("a = '\0'", 1, "null bytes"),
    ],
)
def test_how_a_program_ends_is_told(jail: Jail, code: str, status: int, said: str) -> None:
    result = jail.run(code)
    assert (result.ended, result.exit) == (Ended.EXITED, status)
    assert said in result.stderr
    assert "keeper" not in result.stderr


def test_ordinary_programs_work(jail: Jail) -> None:
    code = """
import atexit, collections, dataclasses, math, subprocess, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
import multiprocessing, os, signal

@dataclasses.dataclass
class Point:
    x: int

def double(x): return 2 * x

with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x"); file.seek(0); assert file.read() == "x"
assert subprocess.run(["/bin/sh", "-c", "echo hi"], capture_output=True, text=True).stdout == "hi\\n"
assert list(ThreadPoolExecutor(4).map(double, range(4))) == [0, 2, 4, 6]
pipe, end = multiprocessing.Pipe()
process = get_context("fork").Process(target=lambda: end.send(Point(3)))
process.start(); assert pipe.recv() == Point(3); process.join()
atexit.register(lambda: print("atexit"))
threading.Thread(target=lambda: (__import__("time").sleep(0.1), print("thread"))).start()
print(math.comb(10, 3), len({"a", "b"}))
"""
    result = jail.run(code)
    assert (result.stdout, result.stderr, result.exit) == ("120 2\nthread\natexit\n", "", 0)


def test_the_order_of_a_set_is_the_same_in_every_run(jail: Jail) -> None:
    code = "print({str(i) for i in range(50)})"
    assert len({jail.run(code).stdout for _ in range(3)}) == 1


def test_nothing_is_kept_between_runs(jail: Jail) -> None:
    code = """
import os
print(os.listdir("/work"), os.listdir("/dev/shm"))
open("x", "w"), open("/dev/shm/x", "w")
"""
    assert [jail.run(code).stdout for _ in range(2)] == ["[] []\n"] * 2


def test_packages_are_seen_and_cannot_be_changed() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "helper.py").write_text("def answer(): return 42\n")
        jail = Jail(BRIEF, packages=(folder,))
        result = jail.run("import helper; print(helper.answer()); open('/packages/0/helper.py', 'w')")
        assert result.stdout == "42\n"
        assert "Read-only file system" in result.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b"])
def test_files_stay_in_the_working_folder(jail: Jail, name: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        jail.run("pass", files={name: "x"})


def test_more_files_than_the_jail_holds_are_refused(jail: Jail) -> None:
    with pytest.raises(ValueError, match="more than half"):
        jail.run("pass", files={"x": b"x" * BRIEF.disk_bytes})


@pytest.mark.parametrize(
    "wrong",
    [
        {"wall_s": 0},
        {"wall_s": float("nan")},
        {"wall_s": True},
        {"cpu_s": -1.0},
        {"memory_bytes": 1 << 20},
        {"processes": 1},
        {"processes": 3.5},
        {"files": 0},
        {"output_bytes": 0},
    ],
)
def test_limits_that_cannot_be_kept_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_many_at_once(jail: Jail) -> None:
    seen: list[str] = []

    def play(number: int) -> None:
        seen.append(jail.run(f"print({number})").stdout)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, seen)) == list(range(16))


def test_descriptors_are_given_back(jail: Jail) -> None:
    jail.run("pass")
    before = len(os.listdir("/proc/self/fd"))
    for limits in (BRIEF, replace(BRIEF, wall_s=0.1), replace(BRIEF, output_bytes=10)):
        jail.run("print('x' * 100, flush=True)\nimport time; time.sleep(0.3)", limits=limits)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def afresh() -> Iterator[None]:
    """What is known of this machine is found out again, before and after."""
    command.host.cache_clear()
    yield
    command.host.cache_clear()


@pytest.mark.parametrize("make", [Jail, CodeInterpreter, lambda: Grader("def grade(a, t): return 1")])
def test_without_bubblewrap_nothing_runs(
    make: Callable[[], object], afresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: object, **options: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", run)
    with pytest.raises(MissingDependency, match="apt-get install bubblewrap") as caught:
        make()
    assert caught.value.reason == "MISSING_DEPENDENCY"


def test_a_bubblewrap_that_cannot_is_told_with_its_words(
    afresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MissingDependency, match="No permissions to create new namespace"):
        Jail().run("print(1)")


def test_the_program_that_services_ask_says_what_there_is() -> None:
    words = [sys.executable, "-m", "opentinker.sandbox"]
    said = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert said["mode"] == (Mode.SLOT_UID if os.geteuid() == 0 else Mode.USER_NAMESPACE)
    assert said["bubblewrap"].startswith("bubblewrap ")


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test of this folder runs without root")
def test_without_root_a_user_namespace_holds_it() -> None:
    """Also that the count of processes is the jail's own, though the user has others."""
    code = """
import time, os
from opentinker.sandbox import Jail, Limits
jail = Jail(Limits(processes=8))
bomb = '''
import os, time
count = 0
while True:
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: break
    count += 1
print(count)
'''
print(jail.capabilities.mode, jail.run("import os; print(os.getuid())").stdout.strip(), jail.run(bomb).stdout)
"""
    # The package, where a user who may read nothing of root's can import it.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        shutil.copytree(PACKAGE, folder / "opentinker", ignore=shutil.ignore_patterns("__pycache__"))
        words = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-B",
            "-c",
            code,
        ]
        done = subprocess.run(
            words, env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
        )
        assert done.stderr == ""
        assert done.stdout.split() == ["USER_NAMESPACE", "65534", "7"]
    finally:
        shutil.rmtree(folder)


def test_jails_die_with_their_maker() -> None:
    code = """
import sys, time
from opentinker.sandbox import Jail
held = Jail().interpreter()
print(held.exec("import os; print(len(os.listdir('/proc')))").stdout, held.pid, flush=True)
held.exec("while True: pass")
"""
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    maker.stdout.readline()
    bubblewrap = int(maker.stdout.readline())
    os.kill(bubblewrap, 0)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 5
    while survivors(set()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert survivors(set()) == {}


def test_using_it_imports_neither_grpc_nor_numpy() -> None:
    code = """
import sys
from opentinker.sandbox import CodeInterpreter
tool = CodeInterpreter(); assert tool.run('1 + 1').stdout == '2\\n'; tool.close()
print([name for name in ("grpc", "numpy", "google.protobuf", "asyncio") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
