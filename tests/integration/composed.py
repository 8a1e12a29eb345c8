"""deploy/compose.yaml without Docker: each service as a process, with the environment that compose gives it.

Host names become loopback addresses, published ports become free ones, and the volumes are folders. What this
cannot show is what the images contain; `make evidence CASE=images` replays their installs.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from opentinker_gateway.healthcheck import is_serving as gateway_health
from opentinker_kit.healthcheck import is_serving
from opentinker_kit.keys import make_keys
from opentinker_kit.processes import Program, Weed, find_binary, free_port, stop, wait_for_answer
from opentinker_kit.testing import PostgresServer, start_postgres

ROOT = Path(__file__).resolve().parents[2]
PORTS = {
    "nats": 4222,
    "minio": 9000,
    "postgres": 5432,
    "scheduler": 7070,
    "trainer": 7071,
    "inference": 7072,
    "env_host": 7073,
    "gateway": 7080,
}
START_S = 120.0


class Composed:
    """The services of the compose file in `folder`; `start` them in the order of their dependencies."""

    def __init__(self, folder: Path, models: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.models = models
        """What compose mounts as /models."""
        self.variables = variables
        """What the user of compose sets."""
        self.keys = folder / "keys"
        self.keys.mkdir()
        self.ports = {name: free_port() for name in PORTS}
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())[
            "services"
        ]
        self.running: list[subprocess.Popen[bytes]] = []
        self.postgres: PostgresServer | None = None
        make_keys(self.keys)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['scheduler']}"

    def start(self) -> None:
        self._start_nats()
        self._start_s3()
        self._start_postgres()
        for name in ("env_host", "scheduler", "gateway", "trainer", "inference"):
            self._start_service(name)

    def stop(self) -> None:
        for process in reversed(self.running):
            stop(process)
        if self.postgres is not None:
            with self.postgres:
                pass

    def environment(self, name: str) -> dict[str, str]:
        """What compose sets for a service, and its image, moved to this machine."""
        moved = {key: self._moved(value) for key, value in self.services[name]["environment"].items()}
        state = self.folder / name
        state.mkdir(exist_ok=True)
        moved["OPENTINKER_STATE_DIR"] = str(state)
        return {key: value.replace("/state", str(state)) for key, value in moved.items()}

    def _moved(self, value: str) -> str:
        value = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: self.variables.get(found[1], found[2]), value)
        for name, port in PORTS.items():
            here = f"127.0.0.1:{self.ports[name]}"
            value = value.replace(f"{name}:{port}", here).replace(f"localhost:{port}", here)
            value = re.sub(rf"^{port}$", str(self.ports[name]), value)
        value = value.replace('"/models"', f'"{self.models}"')
        return value.replace("0.0.0.0", "127.0.0.1").replace("/keys", str(self.keys))

    def _start_nats(self) -> None:
        config = self.keys / "nats.conf"
        text = config.read_text().replace("4222", str(self.ports["nats"])).replace("8222", str(free_port()))
        config.write_text(text.replace("/data", str(self.folder / "nats")))
        self._run(Program("nats", [str(find_binary("nats-server")), "-c", str(config)], self._log("nats")))

    def _start_s3(self) -> None:
        access_key = self.services["minio"]["environment"]["MINIO_ROOT_USER"]
        secret = (self.keys / "s3.key").read_text().strip()
        weed = Weed(self.folder / "minio", Weed.pick_ports(), access_key, secret, volume_size_mb=64)
        self.ports["minio"] = weed.ports[0]
        self._run(weed.program(), weed.ports[0])

    def _start_postgres(self) -> None:
        made = self.services["postgres"]["environment"]
        password = (self.keys / "postgres.key").read_text().strip()
        self.postgres = start_postgres(made["POSTGRES_USER"], password)
        self.ports["postgres"] = self.postgres.port
        with self.postgres.connect() as connection:
            connection.execute(f"CREATE DATABASE {made['POSTGRES_DB']}")

    def _start_service(self, name: str) -> None:
        dockerfile = (ROOT / self.services[name]["build"]["dockerfile"]).read_text()
        (entry,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
        _, *arguments = json.loads(entry)
        program = Program(name, [sys.executable, *arguments], self._log(name), self.environment(name))
        process = program.start()
        self.running.append(process)
        address = f"127.0.0.1:{self.ports[name]}"
        serves = gateway_serves if name == "gateway" else is_serving
        wait_for_answer(process, program, lambda: serves(address), START_S)

    def _run(self, program: Program, port: int | None = None) -> None:
        process = program.start()
        self.running.append(process)
        wait_for_answer(process, program, lambda: listens(port or self.ports[program.name]))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def gateway_serves(address: str) -> bool:
    return gateway_health(f"http://{address}")


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


@contextlib.contextmanager
def composed(folder: Path, models: Path, **variables: str) -> Iterator[Composed]:
    """The whole deployment, stopped at the end."""
    deployment = Composed(folder, models, variables)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()
