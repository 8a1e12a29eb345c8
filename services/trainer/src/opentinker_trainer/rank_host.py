"""A place for one rank of a trainer whose rank 0 is on another machine.

    python -m opentinker_trainer.rank_host --listen 10.0.0.7:7300 --key-file rank.key --directory ranks

It starts a rank whenever rank 0 asks for one, ends the one before, and says how it ended. So a group that
lost a rank comes together again without anybody's help. Base models lie at the same path on every machine.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from opentinker_kit.files import write_atomic
from opentinker_kit.lifeline import die_with_parent, exit_at_eof
from opentinker_kit.logging import configure
from opentinker_kit.settings import read_secret
from opentinker_trainer import rank_link
from opentinkerapi.engine.v1 import frame_pb2

log = structlog.get_logger()


class RankHost:
    """Starts ranks, one at a time. Used from the main thread."""

    def __init__(self, host: str, port: int, key: str, directory: Path, local_rank: int = 0) -> None:
        """Listen. OSError. `local_rank`: which of the GPUs that this process sees."""
        self._host = host
        self._key = key
        self._directory = directory
        self._local_rank = local_rank
        self._listener = socket.create_server((host, port))
        self._rank: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        """Take callers, for ever."""
        while True:
            connection, peer = self._listener.accept()
            try:
                self._serve(connection)
            except OSError as error:
                log.warning("a caller is sent away", peer=peer[0], error=str(error))
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        rank_link.keep_alive(connection)
        try:
            start = rank_link.accept(connection, self._key)
        except rank_link.LinkError as error:
            rank_link.answer(connection, error=str(error))
            raise
        self._end()
        try:
            process = self._start(start, connection)
        except OSError as error:
            rank_link.answer(connection, error=f"the rank cannot be started: {error}")
            raise
        self._rank = process
        log.info("started", rank=start.rank, count=start.count, pid=process.pid)
        threading.Thread(target=_see_off, args=(process, connection), daemon=True).start()

    def _start(self, start: rank_link.RankStart, connection: socket.socket) -> subprocess.Popen[bytes]:
        folder = self._directory / f"rank-{start.rank}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        env = {
            **os.environ,
            **start.env,
            **rank_link.variables(start, connection, self._local_rank),
            rank_link.ADDRESS_VARIABLE: self._host,
            rank_link.FOLDER_VARIABLE: str(folder),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "opentinker_trainer.engine"],
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            preexec_fn=die_with_parent,
        )
        # The rank reads from the connection only once it is up, long after this line is gone.
        rank_link.answer(connection, pid=process.pid)
        return process

    def _end(self) -> None:
        if self._rank is not None:
            with contextlib.suppress(ProcessLookupError):
                self._rank.send_signal(signal.SIGKILL)
            self._rank.wait()


def _see_off(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Tell rank 0 how a rank ended."""
    status = process.wait()
    log.info("ended", pid=process.pid, status=status)
    with contextlib.suppress(OSError), connection:
        rank_link.send_frame(connection, frame_pb2.Frame(method=rank_link.EXIT, body=str(status).encode()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run until killed or the lifeline ends."""
    parser = argparse.ArgumentParser(
        prog="python -m opentinker_trainer.rank_host",
        description="A place for one rank of a trainer whose rank 0 is on another machine.",
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="port 0: a free one")
    parser.add_argument("--key-file", required=True, type=Path, help="the trainer's rank_key_file (0600)")
    parser.add_argument("--directory", required=True, type=Path, help="where checkpoints lie for a moment")
    parser.add_argument("--ready-file", type=Path, help="written once it listens: JSON with address and pid")
    parser.add_argument("--lifeline-fd", type=int, help="it ends when this pipe does")
    parser.add_argument("--local-rank", type=int, default=0, help="which of the GPUs that it sees; default 0")
    args = parser.parse_args(argv)
    configure(service="rank-host")
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--listen is {args.listen!r}; it must be HOST:PORT")
    if args.lifeline_fd is not None:
        exit_at_eof(args.lifeline_fd)
    try:
        key = read_secret(args.key_file)
        place = RankHost(host.strip("[]"), int(port), key, args.directory, args.local_rank)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.ready_file is not None:
        write_atomic(args.ready_file, json.dumps({"address": place.address, "pid": os.getpid()}))
    place.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
