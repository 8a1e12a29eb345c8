"""What episodes were made of and what they answered, in a file, for a host that is started again.

Lines of JSON, written by `flush` before callers are answered, those of many answers at once: whatever a
caller has seen is here, even if the process is killed then. (A machine that loses its power may lose the last
lines; clients then play those episodes anew.) The file is rewritten with what is still open when it is read
and when it has grown. A disk that is full ends no episode: the file is given up, and written anew once there
is room.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from opentinker_env_host.domain.episode import Episode, Recipe, Turn

log = structlog.get_logger()

REWRITE_BYTES = 64 << 20
_BATCH_LINES = 10_000

_dump = json.JSONEncoder(separators=(",", ":")).encode


class FileJournal:
    """See the module's text. One process at a time uses a file: another that has the same keeps nothing, and
    says so in its log.
    """

    def __init__(self, path: Path, rewrite_bytes: int = REWRITE_BYTES) -> None:
        self._path = path
        self._rewrite_bytes = rewrite_bytes
        self._fd = -1
        self._lock = -1
        self._size = 0
        self._grown = 0
        self._waiting: list[bytes] = []
        self._given_up = False

    def load(self) -> list[Episode]:
        """The episodes that were open, with what they answered; expired until renewed."""
        episodes: dict[str, Episode] = {}
        if not self._take():
            log.warning(
                "another host has this journal; episodes do not survive a restart", path=str(self._path)
            )
            return []
        if self._path.exists():
            with self._path.open("rb") as lines:
                for line in lines:
                    try:
                        _apply(episodes, json.loads(line))
                    except (ValueError, KeyError, TypeError, RecursionError) as error:
                        # The last line of a process that was killed, or of a full disk.
                        log.warning("journal has a line that cannot be read", error=str(error))
        self.rewrite(episodes.values())
        return list(episodes.values())

    def opened(self, episodes: Iterable[Episode]) -> None:
        """Episodes were opened."""
        self._add(map(_opening, episodes))

    def begun(self, episode: Episode) -> None:
        """The first observation was given."""
        self._add([["begin", episode.name, episode.first_digest]])

    def moved(self, episode: Episode) -> None:
        """The episode was forked from a snapshot, or taken back to one."""
        self._add([["close", episode.name], *_whole(episode)])

    def stepped(self, episode: Episode) -> None:
        """A step was answered."""
        self._add([_stepping(episode.name, episode.last_seq, episode)])

    def closed(self, name: str) -> None:
        """An episode is over, for whatever reason."""
        self._add([["close", name]])

    def flush(self) -> None:
        """Have what was told so far in the file."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._fd >= 0:
            try:
                self._append(b"".join(waiting))
            except OSError as error:
                self._give_up(error)

    def tidy(self, episodes: Iterable[Episode]) -> None:
        """Rewrite the file with these, which are all that are open, if it has grown enough."""
        self.flush()
        if self._given_up or (self._fd >= 0 and self._grown > max(self._rewrite_bytes, self._size)):
            self.rewrite(episodes)

    def rewrite(self, episodes: Iterable[Episode]) -> None:
        """Have the file hold these and nothing else."""
        new = self._path.with_suffix(".new")
        # They are as they are now, whatever of it was still to be written.
        self._waiting.clear()
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._given_up = fd, False
            for episode in episodes:
                self._add(_whole(episode))
                if len(self._waiting) > _BATCH_LINES:
                    self.flush()
            self.flush()
            if self._fd < 0:
                return
            os.replace(new, self._path)
            self._size, self._grown = os.fstat(fd).st_size, 0
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more; the file stays."""
        self.flush()
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1
        self._given_up = False

    def _take(self) -> bool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = -1
        return self._lock >= 0

    def _add(self, lines: Iterable[list[Any]]) -> None:
        if self._fd >= 0:
            self._waiting += [_dump(line).encode() + b"\n" for line in lines]

    def _give_up(self, error: OSError) -> None:
        if not self._given_up:
            log.error("journal cannot be written; episodes do not survive a restart now", error=str(error))
        self._given_up = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        self._grown += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def _opening(episode: Episode) -> list[Any]:
    return ["open", episode.name, asdict(episode.recipe), episode.owner, episode.project]


def _stepping(name: str, seq: int, episode: Episode) -> list[Any]:
    turn = episode.journal[seq - 1]
    # Only the last step can be asked for again.
    key = episode.last_key.hex() if seq == episode.last_seq else ""
    return ["step", name, seq, turn.action, turn.digest, key, episode.done and seq == episode.last_seq]


def _whole(episode: Episode) -> Iterator[list[Any]]:
    yield _opening(episode)
    if episode.first_digest:
        yield ["begin", episode.name, episode.first_digest]
    for seq in range(1, episode.last_seq + 1):
        yield _stepping(episode.name, seq, episode)


def _apply(episodes: dict[str, Episode], line: list[Any]) -> None:
    what, name, *rest = line
    match what:
        case "open":
            recipe, owner, project = rest
            episodes[name] = Episode(name, Recipe(**recipe), 0.0, owner, project)
        case "begin":
            (episodes[name].first_digest,) = rest
        case "step":
            seq, action, digest, key, done = rest
            episode = episodes[name]
            if seq != episode.last_seq + 1:
                raise ValueError(f"step {seq} of {name} after step {episode.last_seq}")
            episode.journal.append(Turn(action, digest))
            episode.last_seq, episode.last_key, episode.done = seq, bytes.fromhex(key), done
        case "close":
            episodes.pop(name, None)
        case _:
            raise ValueError(f"no {what!r} is known")
