"""What an embedded stack consists of: NATS, S3, scheduler, env_host, gateway, and how each is started and
asked.

Everything listens on loopback with keys of this stack. Scheduler and env_host get ports that the supervisor
keeps bound (`reuse_port`), so that their addresses are known before they start and survive their restarts.
The gateway's port is listened on by the supervisor, which starts the gateway when somebody connects: a stack
that is only trained on does without.
"""

import json
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opentinker_kit.files import make_key_file, write_json
from opentinker_kit.processes import LOOPBACK, REGION, Nats, Program, Weed, free_port
from opentinker_local.state import StateDir

BUCKET = "opentinker"
S3_ACCESS_KEY = "stack"
SERVERS = ("gateway", "scheduler", "env_host")
"""The parts that are our own servers, in the order in which they are stopped."""
MODULES: Mapping[str, str] = {
    "gateway": "opentinker_gateway",
    "scheduler": "opentinker_scheduler",
    "env_host": "opentinker_env_host",
}
"""What `python -m` runs, by part."""
GATEWAY_DRAIN_S = 3.0
"""What streams get when the stack stops; the scheduler's turn comes after them."""
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Part:
    """One child of the supervisor."""

    name: str
    program: Program
    answers: Callable[[int], bool]
    """Whether the process with this pid answers its health check."""
    prepare: Callable[[], None] = lambda: None
    """Runs before each start."""
    forget: Callable[[], None] = lambda: None
    """Runs after each end: removes what the program leaves behind."""
    listener: socket.socket | None = None
    """A socket that listens for the program, which is started at the first connection; None: at once."""


@dataclass(slots=True)
class Addresses:
    """Where everything listens. Our own servers by sockets that hold their ports."""

    nats: int
    weed: tuple[int, int, int, int, int]
    scheduler: socket.socket
    env_host: socket.socket
    gateway: socket.socket

    def to_json(self) -> dict[str, Any]:
        return {
            "nats": self.nats,
            "weed": list(self.weed),
            "scheduler": port_of(self.scheduler),
            "env_host": port_of(self.env_host),
            "gateway": port_of(self.gateway),
        }

    @property
    def gateway_url(self) -> str:
        return f"http://{LOOPBACK}:{port_of(self.gateway)}"

    def close(self) -> None:
        self.scheduler.close()
        self.env_host.close()
        self.gateway.close()


@dataclass(frozen=True, slots=True)
class Options:
    """What may differ between stacks."""

    modules: Mapping[str, str] = field(default_factory=lambda: dict(MODULES))
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More settings by part (`scheduler`, `env_host`, `gateway`), over what the stack sets itself."""


def choose_addresses(state: StateDir, *, fresh: bool) -> Addresses:
    """Ports for a start: those of the last one where they are free, unless `fresh`."""
    last: dict[str, Any] = {}
    if not fresh and state.ports.exists():
        last = json.loads(state.ports.read_text())
    nats = last.get("nats", 0)
    weed = last.get("weed", ())
    addresses = Addresses(
        nats=nats if nats and _all_free([nats]) else free_port(),
        # The second port of each pair is 10000 above, see opentinker_kit.processes.
        weed=_five(weed)
        if len(weed) == 5 and _all_free([*weed, *(port + 10_000 for port in weed)])
        else Weed.pick_ports(),
        scheduler=hold_port(last.get("scheduler", 0)),
        env_host=hold_port(last.get("env_host", 0)),
        gateway=hold_port(last.get("gateway", 0)),
    )
    addresses.gateway.listen(_BACKLOG)
    write_json(state.ports, addresses.to_json())
    return addresses


def _five(ports: list[int]) -> tuple[int, int, int, int, int]:
    first, second, third, fourth, fifth = ports
    return first, second, third, fourth, fifth


def _all_free(ports: list[int]) -> bool:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                return False
    return True


def hold_port(wanted: int = 0) -> socket.socket:
    """A socket bound to a port, the wanted one if it is free; it does not listen.

    As long as it lives nobody but this user's servers that ask for it (SO_REUSEPORT) can bind the port.
    """
    for port in (wanted, 0):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            if port == 0 or _all_free([port]):
                holder.bind((LOOPBACK, port))
                return holder
        except OSError:
            pass
        holder.close()
    raise OSError(f"no port can be bound on {LOOPBACK}")


def port_of(holder: socket.socket) -> int:
    """The port that a socket is bound to."""
    port: int = holder.getsockname()[1]
    return port


def make_keys(state: StateDir) -> None:
    """Make what the stack keeps secret, once."""
    for name in ("bootstrap", "service", "nats", "s3"):
        make_key_file(state.key(name))


def build_parts(
    state: StateDir, addresses: Addresses, options: Options, *, lifeline: int, busy: int
) -> list[Part]:
    """The parts in the order they are started: what takes longest first.

    Our servers inherit `lifeline`, the read end of a pipe, and `busy`, a locked file.
    """
    nats = Nats(state.part("nats"), addresses.nats, _secret(state, "nats"))
    weed = Weed(state.part("s3"), addresses.weed, S3_ACCESS_KEY, _secret(state, "s3"))
    scheduler = f"{LOOPBACK}:{port_of(addresses.scheduler)}"
    env_host = f"{LOOPBACK}:{port_of(addresses.env_host)}"
    shared = {
        "listen_host": LOOPBACK,
        "reuse_port": True,
        "bootstrap_key_file": str(state.key("bootstrap")),
        "service_key_file": str(state.key("service")),
        "nats_url": nats.url,
        "nats_token_file": str(state.key("nats")),
        "s3": {
            "endpoint": weed.endpoint,
            "access_key": S3_ACCESS_KEY,
            "secret_key_file": str(state.key("s3")),
            "bucket": BUCKET,
            "region": REGION,
        },
        "scheduler_address": scheduler,
        "lifeline_fd": lifeline,
    }
    service_settings: dict[str, dict[str, Any]] = {
        "scheduler": {
            "listen_port": port_of(addresses.scheduler),
            "env_host_address": env_host,
            "gateway_address": addresses.gateway_url,
            "allow_any_model_dir": True,
        },
        "env_host": {"listen_port": port_of(addresses.env_host), "require_job_tokens": True},
    }
    services = [
        _service(state, name, options, (lifeline, busy), {**shared, **own, **options.settings.get(name, {})})
        for name, own in service_settings.items()
    ]
    listener = addresses.gateway
    gateway_settings = {
        **{name: shared[name] for name in ("listen_host", "bootstrap_key_file", "service_key_file")},
        "listen_fd": listener.fileno(),
        "scheduler_address": scheduler,
        "lifeline_fd": lifeline,
        "drain_s": GATEWAY_DRAIN_S,
        **options.settings.get("gateway", {}),
    }
    fds = (lifeline, busy, listener.fileno())
    gateway = replace(_service(state, "gateway", options, fds, gateway_settings), listener=listener)
    return [
        gateway,
        Part(
            "s3",
            weed.program(),
            lambda _: weed.answers(BUCKET),
            _writes_configuration(weed),
            weed.remove_sockets,
        ),
        *services,
        Part("nats", nats.program(), lambda _: nats.answers()),
    ]


def _writes_configuration(weed: Weed) -> Callable[[], None]:
    def prepare() -> None:
        weed.program()
        weed.remove_sockets()

    return prepare


def _service(
    state: StateDir, name: str, options: Options, fds: tuple[int, ...], settings: Mapping[str, Any]
) -> Part:
    """One of our own servers: ready when it has said so in its ready file."""
    directory = state.part(name)
    directory.mkdir(exist_ok=True, mode=0o700)
    ready = directory / "ready.json"
    path = directory / "settings.json"
    content = {
        **settings,
        "state_dir": str(directory),
        "instance_id": name,
        "ready_file": str(ready),
    }
    write_json(path, content, mode=0o600)
    argv = [sys.executable, "-P", "-m", options.modules[name], "--settings", str(path)]
    program = Program(
        name,
        argv,
        directory / f"{name}.log",
        # What the stack decides must not be overridden by what the user's environment says for other servers.
        drops=tuple(f"OPENTINKER_{key.upper()}{end}" for key in content for end in ("", "__*")),
        pass_fds=fds,
        dies_with_parent=False,
    )
    return Part(name, program, lambda pid: _is_ready(ready, pid), lambda: ready.unlink(missing_ok=True))


def _is_ready(path: Path, pid: int) -> bool:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return bool(report.get("pid") == pid)


def _secret(state: StateDir, name: str) -> str:
    return state.key(name).read_text().strip()
