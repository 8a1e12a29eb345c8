"""A host that is started again plays the episodes of the one before it, if they repeat themselves."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from services.env_host.tests.conftest import WORLDS, Running, Start, stop, text_of, world

from opentinker_env_host.adapters.journal import FileJournal
from opentinker_env_host.domain.episode import Answered, Episode, Recipe
from opentinker_env_host.ports import Reply
from opentinker_kit.testing.waiting import wait_until, wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import (
    EnvironmentCrashed,
    EpisodeNotFound,
    FailedPrecondition,
    SeqReused,
    StepTimeout,
)


async def test_episodes_go_on_after_a_restart(start: Start, tmp_path: Path) -> None:
    before = await start(state_dir=tmp_path)
    whole, played, ended, closed, failed, unbegun = await before.open(size=6, seed=9, timeout_s=1.0)
    first = await before.begin(whole)
    expected = [text_of((await before.step(whole, seq, "go")).pending) for seq in range(1, 6)]
    for episode in (played, ended, closed, failed):
        assert await before.begin(episode) == first
    for seq in (1, 2, 3):
        last = await before.step(played, seq, "go")
    end = await before.step(ended, 1, "end")
    await before.close([closed])
    with pytest.raises(StepTimeout):
        await before.step(failed, 1, "hang")
    await stop(before)

    after = await start(state_dir=tmp_path)
    assert after.env_host.host.open_episodes == 4
    again = await after.step(played, 3, "go")
    assert again.replayed
    # All but the info, which holds the time.
    assert (text_of(again.pending), again.rewards) == (text_of(last.pending), last.rewards)
    with pytest.raises(SeqReused):
        await after.step(played, 3, "other")
    assert await after.begin(played) == first
    answers = [text_of((await after.step(played, seq, "go")).pending) for seq in (4, 5)]
    assert answers == expected[3:]
    assert (await after.step(ended, 1, "end")).terminated == end.terminated
    with pytest.raises(FailedPrecondition, match="takes no more steps"):
        await after.step(ended, 2, "go")
    assert (await after.finalize(ended)).rewards[0].reward.value == 1.0
    assert await after.begin(unbegun) == first
    for gone in (closed, failed):
        with pytest.raises(EpisodeNotFound):
            await after.begin(gone)
    assert not after.bus.failed


@pytest.mark.parametrize(
    ("environment", "why"), [("forgetful", "came out differently"), ("honest", "promise")]
)
async def test_what_cannot_be_repeated_is_lost_with_its_host(
    start: Start, tmp_path: Path, environment: str, why: str
) -> None:
    worlds = {environment: world(environment.capitalize())}
    before = await start(worlds, state_dir=tmp_path)
    begun, unbegun = await before.open(environment, size=2)
    await before.begin(begun)
    await stop(before)
    after = await start(worlds, state_dir=tmp_path)
    with pytest.raises(EnvironmentCrashed, match=why) as raised:
        await after.step(begun, 1, "go")
    assert raised.value.metadata["end_reason"] == "SANDBOX_LOST"
    await after.begin(unbegun)


async def test_what_nobody_asks_for_after_a_restart_ends_with_its_lease(start: Start, tmp_path: Path) -> None:
    before = await start(state_dir=tmp_path)
    await before.open(size=3, ttl_s=1.0)
    await stop(before)
    after = await start(state_dir=tmp_path)
    assert after.env_host.host.open_episodes == 3
    await wait_until(lambda: after.env_host.host.open_episodes == 0, 10)
    assert [fact.reason for fact in after.bus.failed] == ["LEASE_EXPIRED"] * 3
    await stop(after)
    assert (await start(state_dir=tmp_path)).env_host.host.open_episodes == 0


async def test_a_host_that_is_killed_in_the_middle_of_steps(tmp_path: Path) -> None:
    settings, ready = tmp_path / "env_host.json", tmp_path / "ready.json"
    written: dict[str, Any] = {
        "environments": {"counter": {"target": "worlds:Counter", "path": [str(WORLDS)]}},
        "ready_file": str(ready),
        "state_dir": str(tmp_path / "state"),
    }
    settings.write_text(json.dumps(written))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(settings)]
    episodes: list[str] = []
    done = [0] * 8

    async def rounds(host: Running, number: int, last: int) -> None:
        for seq in range(done[number] + 1, last + 1):
            answer = await host.step(episodes[number], seq, "go")
            assert text_of(answer.pending).startswith(f"count {seq} ")
            done[number] = seq

    for life in range(3):
        ready.unlink(missing_ok=True)
        with (tmp_path / "log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:  # noqa: ASYNC220
            try:
                wait_until_sync(ready.exists, 30, what="env_host is ready")
                port = json.loads(ready.read_text())["port"]
                async with open_channel(f"127.0.0.1:{port}") as channel:
                    host = Running(None, channel, None)  # type: ignore[arg-type]
                    if not episodes:
                        episodes += await host.open(size=len(done))
                        await asyncio.gather(*(host.begin(episode) for episode in episodes))
                    if life < 2:
                        playing = [
                            asyncio.create_task(rounds(host, number, 10_000)) for number in range(len(done))
                        ]
                        least = min(done) + 20
                        await wait_until(lambda least=least: min(done) >= least, 20)  # type: ignore[misc]
                        process.kill()
                        ends = await asyncio.gather(*playing, return_exceptions=True)
                        assert all(isinstance(end, ConnectionError) for end in ends)
                    else:
                        await asyncio.gather(
                            *(rounds(host, number, done[number] + 5) for number in range(len(done)))
                        )
            finally:
                process.kill()


def _episode(name: str, steps: int, text: str = "go") -> Episode:
    episode = Episode(name, Recipe("e", 1, {"a": "\ud800"}, {}, 60.0, 5.0), 0.0, "jobs/j", "p")
    if steps >= 0:
        episode.first_digest = "first"
    for seq in range(1, steps + 1):
        reply = Reply({"terminated": False, "truncated": False}, (), f"d{seq}", 0.0)
        episode.record(seq, b"\x00key", {"text": text}, Answered(reply, False))
    return episode


def _kept(path: Path) -> dict[str, tuple[int, str, bytes, str]]:
    journal = FileJournal(path)
    found = {
        episode.name: (episode.last_seq, episode.first_digest, episode.last_key, episode.owner)
        for episode in journal.load()
    }
    journal.close()
    return found


def test_a_journal_survives_a_torn_line_and_keeps_what_is_open(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "episodes.journal"
    journal = FileJournal(path)
    assert journal.load() == []
    one, other, gone = _episode("one", -1), _episode("other", -1), _episode("gone", -1)
    journal.opened([one, other, gone])
    one = _episode("one", 0)
    journal.begun(one)
    for seq in (1, 2):
        one = _episode("one", seq)
        journal.stepped(one)
    journal.closed("gone")
    journal.close()
    assert path.stat().st_mode & 0o777 == 0o600
    expected = {"one": (2, "first", b"\x00key", "jobs/j"), "other": (0, "", b"", "jobs/j")}
    assert _kept(path) == expected
    with path.open("ab") as file:
        file.write(b'["step","one",3,{"te')
    assert _kept(path) == expected
    # Reading it rewrote it.
    assert b"gone" not in path.read_bytes()
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    (loaded,) = [episode for episode in FileJournal(path).load() if episode.name == "one"]
    assert loaded.journal == one.journal
    assert loaded.recipe == one.recipe
    assert loaded.cold


def test_a_journal_that_grew_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "episodes.journal"
    journal = FileJournal(path, rewrite_bytes=10_000)
    journal.load()
    for number in range(200):
        journal.opened([_episode(f"e{number}", -1)])
        journal.closed(f"e{number}")
    live = _episode("live", 3)
    journal.flush()
    size = path.stat().st_size
    journal.tidy([live])
    assert path.stat().st_size < size / 10
    journal.stepped(_episode("live", 4))
    journal.tidy([live])
    journal.close()
    assert _kept(path) == {"live": (4, "first", b"\x00key", "jobs/j")}


def test_two_hosts_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "episodes.journal"
    journal, second = FileJournal(path), FileJournal(path)
    journal.load()
    journal.opened([_episode("mine", -1)])
    assert second.load() == []
    second.opened([_episode("theirs", -1)])
    second.tidy([])
    second.close()
    journal.close()
    assert list(_kept(path)) == ["mine"]
