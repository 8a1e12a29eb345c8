"""The first process of a jail: starts the code as its child, watches it, and says how it ended.

Its code is handed to the jail's own interpreter; nothing imports it outside. As process 1 of its process
namespace nothing in the jail can stop or kill it, everything else dies with it, and /proc shows it exactly
the jail's processes. It adds what limits of single processes leave open: memory, processes and files of all
together. It imports only what is built in, because each import costs every run.

    control   a socket; frames of 4 bytes of length (big endian) and that many bytes. In: a request (marshal;
              who made the jail is trusted by it). Out, from the code itself and worth no more than that:
              "done <number> <exit> <cpu in us> <peak bytes>" after an exec, JSON from a grader.
    report    a pipe, out: "READY\\n", then at the end "<how> <exit> <peak bytes>\\n".
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` imports enum
import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False  # that of `typing`, whose import costs too much
if TYPE_CHECKING:
    from typing import Any

POLL_FIRST_S, POLL_LAST_S = 0.02, 0.2
WORK, SHARED = "/work", "/dev/shm"


def main(control: int, report: int) -> None:
    """Take the first request, start the code, watch it."""
    os.write(report, b"READY\n")
    request = receive(control)
    if request is None:
        os._exit(0)
    for name, data in request["files"].items():
        path = os.path.join(WORK, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    limits = request["limits"]
    # Process 1 gets those signals from inside that it handles, and an interpreter handles SIGINT.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    child = os.fork()
    if child == 0:
        os.close(report)
        confine(limits, request["mode"] == "once")
        sys.path[:0] = [WORK, *request["paths"]]
        MODES[request["mode"]](control, request)
        os._exit(0)
    os.close(control)
    how, status = watch(child, limits)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    os.write(report, b"%s %d %d\n" % (how, status, peak))
    # With it everything else that still runs in the jail is killed.
    os._exit(0)


def confine(limits: dict[str, Any], once: bool) -> None:
    """Limits of single processes, for this one and what it starts."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
    try:
        # Where the machine itself runs out of memory, the jail goes first.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    fixed = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        # The keeper is one of them.
        resource.RLIMIT_NPROC: limits["processes"] + 1,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in fixed.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if once:
        seconds = -int(-limits["cpu_s"] // 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def watch(child: int, limits: dict[str, Any]) -> tuple[bytes, int]:
    """Wait for the child; what it came to, and its status or signal."""
    pause, before = POLL_FIRST_S, None
    while True:
        _signal.sigtimedwait([_signal.SIGCHLD], pause)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == child:
                    return ended(os.waitstatus_to_exitcode(status), limits)
                if pid == 0:
                    break
        except ChildProcessError:
            return b"LOST", 0
        used = held()
        if used[0] > limits["memory_bytes"]:
            return b"MEMORY_LIMIT", 0
        if used[1] > limits["processes"] + 1:
            return b"PROCESS_LIMIT", 0
        if used[2] > limits["files"]:
            return b"FILE_LIMIT", 0
        # Quick while something grows; jails that only wait should cost nothing.
        pause = POLL_FIRST_S if used != before else min(2 * pause, POLL_LAST_S)
        before = used


def ended(code: int, limits: dict[str, Any]) -> tuple[bytes, int]:
    if code >= 0:
        return b"EXITED", code
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage.ru_utime + usage.ru_stime >= limits["cpu_s"]
    if code == -_signal.SIGXCPU or (code == -_signal.SIGKILL and spent):
        return b"CPU_LIMIT", -code
    return b"SIGNALLED", -code


def held() -> tuple[int, int, int]:
    """Bytes of memory, processes and files of everything in the jail but this process."""
    page = resource.getpagesize()
    memory = processes = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        processes += 1
        try:
            with open(f"/proc/{name}/statm") as file:
                words = file.read().split()
        except OSError:
            continue
        # Pages of files (the interpreter's own) are shared by all and count for none.
        memory += (int(words[1]) - int(words[2])) * page
    files = 0
    for folder in (WORK, SHARED):
        facts = os.statvfs(folder)
        files += facts.f_files - facts.f_ffree
    return memory, processes, files


def once(control: int, request: dict[str, Any]) -> None:
    """Run a program and end with its status."""
    os.close(control)
    names = fresh_main()
    status = execute(request["code"], names, echo=False)
    finish(status)


def session(control: int, request: dict[str, Any]) -> None:
    """Run what comes, one after the other, in one namespace."""
    os.set_inheritable(control, False)
    names = fresh_main()
    own = os.getpid()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while (step := receive(control)) is not None:
        before = cpu_s()
        limit = -int(-(before + step["cpu_s"]) // 1)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        status = execute(step["code"], names, echo=True)
        if os.getpid() != own:
            # A process that the code forked and that came this far. One interpreter is enough.
            finish(status)
        flush()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = (step["number"], status, (cpu_s() - before) * 1e6, peak)
        send(control, b"done %d %d %d %d" % figures)


def grade(control: int, request: dict[str, Any]) -> None:
    """Call a grading function. What it grades is data here; `run` has a program run in a jail of its own."""
    import json

    os.set_inheritable(control, False)
    names = fresh_main()

    def run(code: str, stdin: str = "", files: dict[str, str] | None = None) -> Any:
        ask = {"run": {"code": code, "stdin": stdin, "files": files or {}}}
        send(control, json.dumps(ask).encode())
        return receive(control)

    names["run"] = run
    status = execute(request["code"], names, echo=False)
    if status == 0:
        names["_answer"], names["_task"] = request["answer"], request["task"]
        status = execute(f"_score = {request['name']}(_answer, _task)", names, echo=False)
    if status == 0:
        score = names["_score"]
        if not isinstance(score, dict):
            score = {"value": score if score is None else float(score)}
        send(control, json.dumps({"score": score}).encode())
    finish(status)


def fresh_main() -> dict[str, Any]:
    """The namespace of a program that is the main one."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["<code>"]
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    names = module.__dict__
    names["__builtins__"] = builtins
    return names


def execute(source: str, names: dict[str, Any], echo: bool) -> int:
    """Run source text; its exit status. With `echo` the value of a last expression is shown."""
    try:
        if not echo:
            exec(compile(source, "<code>", "exec", dont_inherit=True), names)
            return 0
        import _ast

        tree: Any = compile(source, "<code>", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, "<code>", "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last), "<code>", "eval", dont_inherit=True), names)
            sys.displayhook(value)
        return 0
    except SystemExit as error:
        return exit_status(error.code)
    except BaseException as error:
        trace = error.__traceback__
        try:
            # Without the frame of this function, which is none of the code's.
            sys.__excepthook__(type(error), error.with_traceback(trace and trace.tb_next), None)
        except BaseException:
            pass
        return 1


def exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    try:
        sys.stderr.write(f"{code}\n")
    except BaseException:
        pass
    return 1


def finish(status: int) -> None:
    """End as an interpreter does, but for taking itself apart."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
    except BaseException:
        pass
    flush()
    os._exit(status)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def receive(control: int) -> Any:
    """The next request; None where the other end is closed."""
    size = take(control, 4)
    if size is None:
        return None
    data = take(control, int.from_bytes(size, "big"))
    return None if data is None else marshal.loads(data)


def take(control: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(control, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(control: int, data: bytes) -> None:
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(control, data) :]


MODES = {"once": once, "session": session, "grade": grade}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
