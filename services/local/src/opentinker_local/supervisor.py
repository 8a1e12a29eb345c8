"""The supervisor: starts the parts of a stack side by side, restarts what dies, ends everything with its
owner.

One thread and one loop: the kernel ties children to the thread that forked them (PR_SET_PDEATHSIG), and a
process that does little has little to get wrong. It is the subreaper of everything below it, so that
processes which the scheduler started stay its descendants even when the scheduler dies, are reaped, and are
found at the end. Our own servers also hold the read end of the lifeline, whose only write end is here.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from opentinker_kit.lifeline import become_subreaper
from opentinker_kit.processes import LOOPBACK, log_tail
from opentinker_local.descendants import descendants, kill_descendants, reap_strangers
from opentinker_local.parts import (
    SERVERS,
    Addresses,
    Options,
    Part,
    build_parts,
    choose_addresses,
    make_keys,
    port_of,
)
from opentinker_local.state import Progress, StackError, StackInfo, StateDir, try_lock

START_TIMEOUT_S = 60.0
PORT_ATTEMPTS = 4
"""How often a start is tried with other ports when a program ends before it answered."""
STABLE_S = 30.0
"""A part that ran this long may die again without waiting for its restart."""
MAX_BACKOFF_S = 5.0
DRAIN_S = 20.0
"""What the scheduler gets to stop its servers in an orderly end."""
ORPHAN_DRAIN_S = 5.5
"""What our servers get when the owner is gone: everything must be gone in 10 s."""
PREDECESSOR_S = 15.0
"""How long servers of a killed supervisor may take to end."""
_BUSY_TICK_S = 0.02
_DRAIN_TICK_S = 0.05
_IDLE_TICK_S = 1.0


@dataclass(slots=True)
class _Child:
    """A part and its process."""

    part: Part
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    up: bool = False
    restarts: int = 0
    """In a row, each before the part was stable."""
    not_before: float = 0.0
    wanted: bool = True
    """Whether it should run; one with a listener only once somebody connected."""

    def start(self, now: float) -> None:
        self.part.prepare()
        self.process = self.part.program.start()
        self.started, self.up = now, False

    def ended(self) -> int | None:
        """Its exit status, once; then it has no process any more."""
        status = self.process.poll() if self.process is not None else None
        if status is not None:
            self.process, self.up = None, False
            self.part.forget()
        return status

    def check(self) -> bool:
        """Whether it came up just now."""
        if self.up or self.process is None or not self.part.answers(self.process.pid):
            return False
        self.up = self.process.poll() is None
        return self.up

    @property
    def settled(self) -> bool:
        """Whether there is nothing to do for it until something happens."""
        return self.up or not self.wanted


class _PortsTaken(Exception):
    """A program ended before it answered; perhaps someone took its port."""


class Supervisor:
    """Runs one stack in the state directory, which it holds."""

    def __init__(self, state: StateDir, options: Options, owner_fd: int | None) -> None:
        """`owner_fd` is the read end of a pipe; the stack ends when its write end is closed."""
        self._state = state
        self._options = options
        self._owner_fd = owner_fd
        self._progress = Progress(state.progress)
        self._children: list[_Child] = []
        self._lifeline_read = -1
        self._lifeline_write = -1
        self._selector = selectors.DefaultSelector()
        self._busy_fd = -1
        self._stop_reason = ""
        self._owner_gone = False
        self._announced = False
        self._addresses: Addresses | None = None
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")

    def run(self) -> None:
        """Start the stack and keep it until told to stop. StackError if it cannot be started."""
        become_subreaper()
        self._state.stack.unlink(missing_ok=True)
        self._listen_for_signals()
        try:
            self._start()
            self._serve()
        except BaseException as error:
            self._progress.say("failed", str(error) or repr(error))
            raise
        finally:
            self._state.stack.unlink(missing_ok=True)
            self._stop()

    # --- starting -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        begin = time.monotonic()
        self._progress.say("starting", f"starting an OpenTinker stack in {self._state.root}")
        make_keys(self._state)
        self._busy_fd = self._wait_for_predecessor()
        for attempt in range(PORT_ATTEMPTS):
            try:
                self._start_once(fresh=attempt > 0)
            except _PortsTaken as error:
                self._kill_children()
                if attempt == PORT_ATTEMPTS - 1:
                    raise StackError(str(error)) from None
                self._progress.say("starting", f"trying other ports: {str(error).splitlines()[0]}")
                continue
            break
        if not self._stop_reason:
            self._announce(f"ready after {time.monotonic() - begin:.1f} s")

    def _wait_for_predecessor(self) -> int:
        """Return once no server of a supervisor that was killed is left; the lock that says so.

        Our servers inherit the lock's descriptor, so the kernel frees it with the last of them.
        """
        fd = os.open(self._state.busy, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + PREDECESSOR_S
        said = False
        while not try_lock(fd):
            if time.monotonic() > deadline or self._stop_reason:
                raise StackError(f"servers of an earlier stack in {self._state.root} do not end")
            if not said:
                self._progress.say("starting", "waiting for the servers of an earlier stack to end")
                said = True
            self._wait(_BUSY_TICK_S)
        return fd

    def _start_once(self, *, fresh: bool) -> None:
        self._close_lifeline()
        self._lifeline_read, self._lifeline_write = os.pipe()
        if self._addresses is not None:
            self._addresses.close()
        self._addresses = choose_addresses(self._state, fresh=fresh)
        parts = build_parts(
            self._state, self._addresses, self._options, lifeline=self._lifeline_read, busy=self._busy_fd
        )
        self._children = [_Child(part, wanted=part.listener is None) for part in parts]
        now = time.monotonic()
        first = [child for child in self._children if child.wanted]
        for child in first:
            child.start(now)
        names = ", ".join(child.part.name for child in first)
        self._progress.say("starting", f"starting {names}")
        while not self._stop_reason and not all(child.up for child in first):
            for child in first:
                status = child.ended()
                if status is not None:
                    why = self._why(child, f"ended with status {status}")
                    # The ports of our own servers are held for them.
                    raise StackError(why) if child.part.name in SERVERS else _PortsTaken(why)
                if child.check():
                    self._progress.say("starting", f"{child.part.name} answers", component=child.part.name)
                elif not child.up and time.monotonic() - now > START_TIMEOUT_S:
                    raise StackError(self._why(child, f"did not answer within {START_TIMEOUT_S:.0f} s"))
            self._wait(_BUSY_TICK_S)
        for child in self._children:
            self._await_connection(child)

    def _await_connection(self, child: _Child) -> None:
        """Notice when somebody connects to a part that runs only then; the connection waits for it."""
        if child.part.listener is not None:
            child.wanted = False
            self._selector.register(child.part.listener, selectors.EVENT_READ, child)

    @staticmethod
    def _why(child: _Child, what: str) -> str:
        program = child.part.program
        return f"{program.name} {what}; {program.log_path} ends with:\n{log_tail(program.log_path)}"

    def _close_lifeline(self) -> None:
        for fd in (self._lifeline_read, self._lifeline_write):
            if fd >= 0:
                os.close(fd)
        self._lifeline_read = self._lifeline_write = -1

    def _announce(self, text: str) -> None:
        """Write `stack.json`: from now on clients may attach."""
        assert self._addresses is not None
        scheduler, env_host = port_of(self._addresses.scheduler), port_of(self._addresses.env_host)
        info = StackInfo(
            state_dir=self._state.root,
            supervisor_pid=os.getpid(),
            owned=self._owner_fd is not None,
            scheduler=f"{LOOPBACK}:{scheduler}",
            env_host=f"{LOOPBACK}:{env_host}",
            gateway=self._addresses.gateway_url,
            nats=f"nats://{LOOPBACK}:{self._addresses.nats}",
            s3=f"{LOOPBACK}:{self._addresses.weed[0]}",
            bootstrap_key_file=self._state.key("bootstrap"),
            service_key_file=self._state.key("service"),
            pids={
                child.part.name: child.process.pid for child in self._children if child.process is not None
            },
            started_at=self._started_at,
        )
        self._state.write_stack(info)
        self._progress.say("ready", text)

    # --- running ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Restart what ends, until told to stop."""
        while not self._stop_reason:
            now = time.monotonic()
            for child in self._children:
                self._keep(child, now)
            self._reap_strangers()
            self._wait(_IDLE_TICK_S if all(child.settled for child in self._children) else _BUSY_TICK_S)

    def _keep(self, child: _Child, now: float) -> None:
        name = child.part.name
        status = child.ended()
        if status is not None:
            stable = now - child.started > STABLE_S
            child.restarts = 1 if stable else child.restarts + 1
            wait = 0.0 if child.restarts == 1 else min(0.25 * 2**child.restarts, MAX_BACKOFF_S)
            child.not_before = now + wait
            how = f"killed by signal {-status}" if status < 0 else f"status {status}"
            when = "starting it again" if child.part.listener is None else "the next connection starts it"
            text = f"{name} ended ({how}); {when}"
            self._progress.say("restarting", text, component=name, log=str(child.part.program.log_path))
            self._await_connection(child)
        if child.process is None:
            if child.wanted and now >= child.not_before:
                child.start(now)
        elif child.check():
            self._announce(f"{name} answers" if child.part.listener is not None else f"{name} answers again")
        elif not child.up and now - child.started > START_TIMEOUT_S:
            # Running and silent: as good as dead.
            child.process.kill()

    # --- waiting ------------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        """Signals and the owner's end arrive as readable descriptors, so that one call waits for all."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(read, selectors.EVENT_READ)
        if self._owner_fd is not None:
            self._selector.register(self._owner_fd, selectors.EVENT_READ)

    def _on_signal(self, signum: int, _: object) -> None:
        self._stop_reason = self._stop_reason or f"told to stop by {signal.Signals(signum).name}"

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Child):
                self._selector.unregister(key.fd)
                key.data.wanted = True
                continue
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, 4096)
            if key.fd == self._owner_fd and data == b"":
                self._selector.unregister(key.fd)
                self._owner_gone = True
                self._stop_reason = self._stop_reason or "the process that started the stack is gone"

    # --- stopping -----------------------------------------------------------------------------------------

    def _stop(self) -> None:
        reason = self._stop_reason or "the start failed"
        self._progress.say("stopping", reason)
        ours = sorted(
            (child for child in self._children if child.part.name in SERVERS),
            key=lambda child: SERVERS.index(child.part.name),
        )
        for child in ours:
            # In order: the gateway ends its jobs at the scheduler, which stops the servers that it started.
            if not self._owner_gone:
                self._terminate(child)
                self._await_end([child], DRAIN_S)
        # S3 and NATS stay until our servers have written what they must.
        self._close_lifeline()
        self._await_servers(ORPHAN_DRAIN_S)
        self._kill_children()
        kill_descendants()
        self._progress.say("stopped", reason)

    @staticmethod
    def _terminate(child: _Child) -> None:
        if child.process is not None and child.process.poll() is None:
            child.process.terminate()

    def _await_end(self, children: list[_Child], timeout_s: float) -> None:
        """Return when these have ended, when the time is up, or when the owner is gone meanwhile."""
        deadline = time.monotonic() + timeout_s
        hurried = self._owner_gone
        while time.monotonic() < deadline and self._owner_gone == hurried:
            if all(child.process is None or child.process.poll() is not None for child in children):
                return
            self._reap_strangers()
            self._wait(_BUSY_TICK_S)

    def _await_servers(self, timeout_s: float) -> None:
        """Return when all of our servers have ended, those that the scheduler started too."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for child in self._children:
                if child.process is not None:
                    child.process.poll()
            self._reap_strangers()
            if not set(descendants()) - self._pids("s3", "nats"):
                return
            time.sleep(_DRAIN_TICK_S)

    def _reap_strangers(self) -> None:
        reap_strangers(self._pids())

    def _pids(self, *names: str) -> set[int]:
        """Process ids of these parts, by default of all."""
        return {
            child.process.pid
            for child in self._children
            if child.process is not None and (not names or child.part.name in names)
        }

    def _kill_children(self) -> None:
        """End what still runs; S3 and NATS keep their data through it."""
        self._close_lifeline()
        for child in self._children:
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                child.ended()
        self._children = []
