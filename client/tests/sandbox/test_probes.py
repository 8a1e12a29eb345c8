"""Hostile programs: what they try, what they get, and that nothing of them is left (see conftest)."""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from client.tests.sandbox.conftest import BRIEF

from opentinker.sandbox import Ended, Jail, Limits, Result
from opentinker.sandbox.slots import FIRST_UID, SLOTS

SECRET = "never-to-be-seen-0xC0FFEE"
MIB = 1 << 20
SMALL = replace(BRIEF, memory_bytes=128 * MIB, disk_bytes=8 * MIB, files=500, processes=16)

IGNORING = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except Exception: pass
"""
ZIP_BOMB = """
import zlib
packer = zlib.compressobj()
bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(160)) + packer.flush()
print(len(bomb), flush=True)
print(len(zlib.decompress(bomb)))
"""


def attempt(jail: Jail, code: str, limits: Limits = SMALL) -> Result:
    """Run it; within the wall clock and a little, whatever it does."""
    started = time.monotonic()
    result = jail.run(code, limits=limits)
    assert time.monotonic() - started < limits.wall_s + 15
    assert len(result.stdout) + len(result.stderr) <= 2 * limits.output_bytes
    return result


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with a key in it, and a key in the process environment."""
    monkeypatch.setenv("OPENTINKER_API_KEY", SECRET)
    state = tmp_path / "state"
    state.mkdir()
    (state / "service.key").write_text(SECRET)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    (state / "service.key").chmod(0o644)
    return state


@pytest.fixture
def listener() -> Iterator[tuple[int, str]]:
    """Something to talk to: a TCP port, and an abstract Unix socket."""
    name = f"\0opentinker.test.{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        yield server.getsockname()[1], name


def test_no_network(jail: Jail, listener: tuple[int, str]) -> None:
    port, name = listener
    code = f"""
import socket
def attempt(what, family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2); s.connect(address)
            s.send(b"x")
            print("REACHED", what)
    except OSError as error:
        print("refused", what)
attempt("local tcp", socket.AF_INET, ("127.0.0.1", {port}))
attempt("local unix", socket.AF_UNIX, {name!r})
attempt("public", socket.AF_INET, ("1.1.1.1", 80))
attempt("udp", socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM)
attempt("metadata", socket.AF_INET, ("169.254.169.254", 80))
attempt("v6", socket.AF_INET6, ("::1", {port}))
attempt("vsock", socket.AF_VSOCK, (2, 22))
attempt("packet", socket.AF_PACKET, ("lo", 0), socket.SOCK_RAW)
attempt("kernel crypto", socket.AF_ALG, ("hash", "sha1"), socket.SOCK_SEQPACKET)
try: socket.getaddrinfo("example.com", 80); print("REACHED dns")
except OSError: print("refused dns")
print(sorted(line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]))
"""
    result = attempt(jail, code)
    assert result.exit == 0, result.stderr
    assert "REACHED" not in result.stdout
    assert result.stdout.count("refused") == 10
    assert result.stdout.endswith("['lo']\n")


def test_no_files_of_the_host(jail: Jail, secrets: Path) -> None:
    code = f"""
import os
for path in ("/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/run", "/sys", "/boot", "/srv", "/opt",
             {str(secrets)!r}, {str(secrets / "service.key")!r}, {os.path.expanduser("~")!r}):
    print(os.path.lexists(path))
found = []
for folder, below, names in os.walk("/"):
    if folder in ("/proc", "/usr", "/dev"): below.clear(); continue
    found += [os.path.join(folder, name) for name in names]
print(found)
"""
    result = attempt(jail, code)
    lines = result.stdout.splitlines()
    assert lines[:-1] == ["False"] * 13, result.stderr
    assert {path.split("/")[1] for path in eval(lines[-1])} <= {"etc"}
    assert "shadow" not in lines[-1]


def test_symbolic_links_lead_nowhere_else(jail: Jail, secrets: Path) -> None:
    key = str(secrets / "service.key")
    code = f"""
import os
up = "../" * 40
targets = [{key!r}, "/etc/shadow", "/proc/1/root" + {key!r}, "/proc/1/cwd/.." + {key!r}, up + {key!r}[1:]]
for number, target in enumerate(targets):
    os.symlink(target, f"link{{number}}")
    try: print("READ", open(f"link{{number}}").read())
    except OSError as error: print("refused")
try: os.link("/usr/bin/env", "hard"); print("LINKED")
except OSError: print("refused")
"""
    result = attempt(jail, code)
    assert result.stdout == "refused\n" * 6, result.stderr


def test_no_secrets_in_the_environment(jail: Jail, secrets: Path) -> None:
    code = """
import glob, os
print(sorted(os.environ))
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try: print(open(path, "rb").read())
    except OSError: pass
"""
    result = attempt(jail, code)
    assert SECRET not in result.stdout
    assert "PATH" in result.stdout
    assert "OPENTINKER" not in result.stdout


def test_no_processes_of_others(jail: Jail) -> None:
    code = f"""
import os
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
print(pids == sorted([1, os.getpid()]))
for pid in ({os.getpid()}, {os.getppid()}):
    if pid in pids: continue
    try: os.kill(pid, 0); print("REACHED")
    except ProcessLookupError: pass
print(os.getppid())
"""
    assert attempt(jail, code).stdout == "True\n1\n"


def test_signals_reach_nobody_else(jail: Jail) -> None:
    code = """
import os, signal, time
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
try: os.killpg(0, signal.SIGCONT)
except OSError: pass
time.sleep(0.2)
print("still here")
"""
    result = attempt(jail, code)
    assert (result.stdout, result.ended, result.exit) == ("still here\n", Ended.EXITED, 0)


def test_no_tracing_no_namespaces_no_mounts_no_root(jail: Jail) -> None:
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    ctypes.set_errno(0)
    answer = getattr(libc, name)(*arguments)
    print(name, "DONE" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
attempt("ptrace", 16, 1, 0, 0)
attempt("ptrace", 0, 0, 0, 0)
buffer = ctypes.create_string_buffer(8)
attempt("process_vm_readv", 1, buffer, 1, buffer, 1, 0)
attempt("unshare", 0x10000000)
attempt("unshare", 0x00020000)
attempt("setns", 0, 0)
attempt("mount", b"none", b"/work", b"tmpfs", 0, None)
attempt("umount2", b"/work", 2)
attempt("chroot", b"/work")
attempt("memfd_create", b"x", 0)
attempt("shmget", 1, 1 << 20, 0o1600)
attempt("setuid", 0)
attempt("sethostname", b"x", 1)
attempt("syscall", 321, 0, 0, 0)
attempt("syscall", 425, 8, buffer)
attempt("syscall", 438, 1, 0, 0)
attempt("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0)
attempt("syscall", 435, buffer, 88)
names = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")
print([line for line in open("/proc/self/status") if line.startswith(names)])
"""
    result = attempt(jail, code)
    assert result.exit == 0, result.stderr
    assert "DONE" not in result.stdout
    assert result.stdout.count("EPERM") == 16
    assert result.stdout.count("ENOSYS") == 1
    said = eval(result.stdout.splitlines()[-1])
    assert [line.split()[1].lstrip("0") for line in said] == ["", "", "", "1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="slots are for root")
def test_each_has_a_user_of_its_own(jail: Jail) -> None:
    with jail.interpreter() as one, jail.interpreter() as other:
        uids = [int(each.exec("import os; os.getuid()").stdout) for each in (one, other)]
    assert len(set(uids)) == 2
    assert all(FIRST_UID <= uid < FIRST_UID + SLOTS for uid in uids)


def test_a_fork_bomb_stops_at_the_limit(jail: Jail) -> None:
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        count += 1
except OSError as error:
    print(count, type(error).__name__)
"""
    result = attempt(jail, code)
    assert result.stdout == f"{SMALL.processes - 1} BlockingIOError\n", result


def test_a_fork_bomb_that_goes_on_is_ended(jail: Jail) -> None:
    code = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
    result = attempt(jail, code, replace(SMALL, wall_s=2))
    assert result.ended in (Ended.TIMEOUT, Ended.CPU_LIMIT, Ended.PROCESS_LIMIT)


def test_threads_count(jail: Jail) -> None:
    code = """
import threading, time
count = 0
try:
    while count < 100:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); count += 1
except RuntimeError: pass
print(count)
"""
    # Each thread has a stack and an arena, of address space alone.
    result = attempt(jail, code, replace(SMALL, memory_bytes=4096 * MIB))
    assert int(result.stdout) == SMALL.processes - 1


def test_daemons_do_not_stay(jail: Jail) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        while True: time.sleep(0.01)
print("away")
"""
    result = attempt(jail, code)
    assert (result.stdout, result.ended) == ("away\n", Ended.EXITED)
    assert result.wall_s < 30


def test_a_swarm_of_zombies_is_held(jail: Jail) -> None:
    code = """
import os
made = 0
for _ in range(2000):
    try:
        if os.fork() == 0: os._exit(0)
        made += 1
    except OSError: break
print(made)
"""
    assert int(attempt(jail, code).stdout) < SMALL.processes


def test_memory_of_one_process(jail: Jail) -> None:
    result = attempt(jail, "data = []\nwhile True: data.append(bytearray(4 << 20))")
    assert (result.ended, result.exit) == (Ended.EXITED, 1)
    assert "MemoryError" in result.stderr
    assert result.peak_bytes <= SMALL.memory_bytes


def test_memory_of_all_processes_together(jail: Jail) -> None:
    code = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        data = bytearray(b"x") * (40 << 20)
        time.sleep(60)
time.sleep(60)
"""
    result = attempt(jail, code)
    assert result.ended is Ended.MEMORY_LIMIT
    assert result.wall_s < SMALL.wall_s


def test_memory_that_is_mapped_and_shared(jail: Jail) -> None:
    code = """
import mmap
held = []
try:
    while True:
        held.append(mmap.mmap(-1, 8 << 20)); held[-1][:] = b"x" * (8 << 20)
except (OSError, ValueError, MemoryError): print(len(held))
"""
    assert int(attempt(jail, code).stdout) * 8 * MIB < SMALL.memory_bytes


def test_the_disk_ends(jail: Jail) -> None:
    code = """
import os
def fill(path):
    size = 0
    try:
        with open(path, "wb", 0) as file:
            while True: size += file.write(b"x" * 65536)
    except OSError: pass
    return size
print(sum(fill(f"/work/{n}") for n in range(4)), sum(fill(f"/dev/shm/{n}") for n in range(4)))
"""
    work, shared = map(int, attempt(jail, code).stdout.split())
    assert 0 < work <= SMALL.disk_bytes
    assert 0 < shared <= SMALL.disk_bytes


def test_there_is_no_other_place_to_write(jail: Jail) -> None:
    code = """
import os
for folder, below, _ in os.walk("/"):
    if folder.startswith(("/proc/", "/usr/")) and folder.count("/") > 1: below.clear()
    try:
        with open(os.path.join(folder, "x"), "w") as file: file.write("x")
        print(folder)
    except OSError: pass
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/dev/core"):
    try: open(path, "w").write("x"); print("WROTE", path)
    except OSError: pass
"""
    result = attempt(jail, code)
    assert sorted(result.stdout.split()) == ["/dev/shm", "/work"], result


def test_files_without_number(jail: Jail) -> None:
    result = attempt(jail, "n = 0\nwhile True:\n    open(f'/dev/shm/{n}', 'w').close(); n += 1")
    assert result.ended is Ended.FILE_LIMIT


def test_descriptors_end(jail: Jail) -> None:
    code = """
import os
held = []
try:
    while True: held.append(os.pipe())
except OSError: print(len(held) * 2)
"""
    assert int(attempt(jail, code).stdout) <= SMALL.open_files


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_bomb(jail: Jail, stream: int) -> None:
    result = attempt(jail, f"import os\nwhile True: os.write({stream}, b'x' * 65536)")
    assert (result.ended, result.exit) == (Ended.OUTPUT_LIMIT, None)
    assert len(result.stdout + result.stderr) == SMALL.output_bytes


def test_a_huge_line(jail: Jail) -> None:
    result = attempt(jail, f"import sys; sys.stdout.write('x' * {SMALL.output_bytes})")
    assert (result.ended, len(result.stdout)) == (Ended.EXITED, SMALL.output_bytes)
    result = attempt(jail, f"import sys; sys.stdout.write('x' * {SMALL.output_bytes + 1})")
    assert (result.ended, len(result.stdout)) == (Ended.OUTPUT_LIMIT, SMALL.output_bytes)


def test_output_that_is_no_text(jail: Jail) -> None:
    code = r"import os; os.write(1, b'a\xff\xfe\0b\xed\xa0\x80'); os.write(2, bytes(range(256)))"
    result = attempt(jail, code)
    assert result.stdout.startswith("a\N{REPLACEMENT CHARACTER}")
    assert "\0b" in result.stdout
    assert result.ended is Ended.EXITED


def test_closed_streams_do_not_hang(jail: Jail) -> None:
    code = """
import os, time
for fd in range(100):
    try: os.close(fd)
    except OSError: pass
time.sleep(0.3)
"""
    result = attempt(jail, code)
    assert (result.ended, result.exit) == (Ended.EXITED, 0)
    assert result.wall_s < 30


def test_input_that_nobody_reads(jail: Jail) -> None:
    result = jail.run("print('done')", stdin=b"x" * (8 << 20), limits=SMALL)
    assert (result.stdout, result.ended) == ("done\n", Ended.EXITED)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(1e6)",
        IGNORING + "while True: time.sleep(1)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nr, w = os.pipe(); os.read(r, 1)",
        "9 ** 9 ** 9",
    ],
)
def test_what_never_ends_is_ended(jail: Jail, code: str) -> None:
    result = attempt(jail, code, replace(SMALL, wall_s=0.7))
    assert (result.ended, result.exit) == (Ended.TIMEOUT, None)
    assert 0.6 < result.wall_s < 30


def test_the_output_before_a_timeout_is_kept(jail: Jail) -> None:
    result = attempt(jail, "print('first'); import time; time.sleep(60)", replace(SMALL, wall_s=0.7))
    assert (result.stdout, result.ended) == ("first\n", Ended.TIMEOUT)


@pytest.mark.parametrize("stubborn", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"])
def test_cpu_time_ends(jail: Jail, stubborn: str) -> None:
    result = attempt(jail, stubborn + "while True: pass", replace(SMALL, cpu_s=1))
    assert result.ended is Ended.CPU_LIMIT
    assert 0.5 < result.cpu_s < 4


@pytest.mark.parametrize(
    "code",
    [
        ZIP_BOMB,
        "eval('[' * 100 + ']' * 99)",
        "import json; json.loads('[' * 100_000)",
        "compile('-' * 1_000_000 + '1', 'x', 'eval')",
        "import ast; ast.literal_eval('(' * 5000 + ')' * 5000)",
        "def f(): f()\nf()",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(x): f([x])\nf(1)",
        "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        "'%*d' % (10**9, 1)",
        "int('9' * 1_000_000)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
    ],
)
def test_bombs_for_parsers_and_stacks_end_their_own_process(jail: Jail, code: str) -> None:
    result = attempt(jail, code)
    assert result.ended in (Ended.EXITED, Ended.SIGNALLED, Ended.CPU_LIMIT)
    assert not result.ok


def test_a_signal_is_told(jail: Jail) -> None:
    result = attempt(jail, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (result.ended, result.exit) == (Ended.SIGNALLED, 137)


def test_what_is_written_to_every_descriptor_changes_nothing(jail: Jail, tmp_path: Path) -> None:
    reward = tmp_path / "reward.txt"
    code = f"""
import os
words = [b"READY\\nEXITED 0 1\\n", b"EXITED 0 1\\n", b"\\xff" * 4, b"done 0 0 0"]
for fd in [*range(3, 1100)]:
    for word in words:
        try: os.write(fd, word)
        except OSError: pass
for path in [{str(reward)!r}, "/work/reward.txt", *(f"/proc/1/fd/{{fd}}" for fd in range(1100))]:
    try: open(path, "w").write("EXITED 0 1\\n")
    except OSError: pass
os._exit(5)
"""
    result = attempt(jail, code)
    assert not reward.exists()
    assert not result.ok
