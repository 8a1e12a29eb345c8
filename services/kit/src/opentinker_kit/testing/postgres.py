"""A real PostgreSQL for tests, from Debian, on a free port of loopback and gone with the test process.

PostgreSQL refuses to run as root: then it runs as the user that Debian made for it. Rows are ordered by a
language's rules and not by bytes, which is what a deployment may have and what tests would otherwise miss.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from opentinker_kit.files import write_atomic
from opentinker_kit.lifeline import die_with_parent
from opentinker_kit.processes import LOOPBACK, StartError, free_port, log_tail
from opentinker_kit.testing.waiting import wait_until_sync

_DEBIAN = Path("/usr/lib/postgresql")
_ACCOUNT = "postgres"
_ATTEMPTS = 5


@dataclass(slots=True)
class PostgresServer:
    """A running PostgreSQL server, and how to reach it."""

    binaries: Path
    directory: Path
    port: int
    user: str
    password_file: Path
    """Of the database's user, 0600."""
    process: subprocess.Popen[bytes] | None = None
    _made: int = field(default=0)

    def url(self, database: str = _ACCOUNT) -> str:
        """`postgresql://user@host:port/database`, without the password."""
        return f"postgresql://{self.user}@{LOOPBACK}:{self.port}/{database}"

    def connect(self, database: str = _ACCOUNT) -> Any:
        """A connection of psycopg that commits each statement."""
        import psycopg  # here: tests without a database do not need it

        password = self.password_file.read_text().strip()
        return psycopg.connect(self.url(database), password=password, autocommit=True, connect_timeout=5)

    def make_database(self, template: str = "template1") -> str:
        """The name of a new database, empty or like `template`."""
        self._made += 1
        name = f"test_{self._made}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def start(self) -> None:
        """Start it, again where it ran before: same address, same data."""
        settings = {
            "listen_addresses": LOOPBACK,
            "port": self.port,
            "unix_socket_directories": "",
            # What is written need not survive a power failure.
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": 60,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        argv = [str(self.binaries / "postgres"), "-D", str(self.directory / "data"), *options]
        log = self.directory / "postgres.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv, stdout=output, stderr=output, cwd="/", preexec_fn=die_with_parent, **_account()
            )
        try:
            wait_until_sync(self._answers, 30.0, what="PostgreSQL answers")
        except AssertionError:
            self.stop()
            raise StartError(f"PostgreSQL does not answer; {log} ends with:\n{log_tail(log)}") from None

    def stop(self) -> None:
        """End it at once, connections and all; what was committed is there when it starts again."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGQUIT)
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        import psycopg

        if self.process is None or self.process.poll() is not None:
            raise AssertionError("it ended")
        with contextlib.suppress(psycopg.OperationalError), self.connect():
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_postgres(user: str = "opentinker", password: str | None = None) -> PostgresServer:
    """Start a server with a superuser of that name; a with statement ends it and removes its data.

    FileNotFoundError, saying what to install, where there is none.
    """
    binaries = find_postgres()
    # Not below pytest's own folder, which only its owner may enter.
    directory = Path(tempfile.mkdtemp(prefix="ot-postgres-"))
    password_file = directory / "password.key"
    write_atomic(password_file, (password or secrets.token_hex(16)) + "\n", mode=0o600)
    if os.geteuid() == 0:
        account = pwd.getpwnam(_ACCOUNT)
        for path in (directory, password_file):
            os.chown(path, account.pw_uid, account.pw_gid)
    argv = [str(binaries / "initdb"), "-D", str(directory / "data"), "-U", user, "-A", "scram-sha-256"]
    argv += [f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
    argv += ["--locale-provider=icu", "--icu-locale=en-US"]
    made = subprocess.run(argv, capture_output=True, text=True, cwd="/", **_account())
    if made.returncode != 0:
        raise StartError(f"initdb failed: {made.stderr}")
    return _again_if_the_port_is_taken(
        lambda: PostgresServer(binaries, directory, free_port(), user, password_file)
    )


def find_postgres() -> Path:
    """The folder of the newest PostgreSQL's programs. FileNotFoundError if there is none."""
    found = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise FileNotFoundError("PostgreSQL is not installed here; run: apt-get install postgresql")
    return found[-1].parent


def _again_if_the_port_is_taken(make: Callable[[], PostgresServer]) -> PostgresServer:
    for attempt in range(_ATTEMPTS):
        server = make()
        try:
            server.start()
        except StartError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return server
    raise AssertionError


def _account() -> dict[str, Any]:
    """As whom to run."""
    return {"user": _ACCOUNT, "group": _ACCOUNT, "extra_groups": ()} if os.geteuid() == 0 else {}
