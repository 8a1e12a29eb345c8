"""The host's side of the pipe against the worker's."""

import asyncio
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.environments import frames as worker_frames
from opentinker_env_host.adapters import frames

FRAMES = st.lists(
    st.tuples(
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=3).filter(
            lambda header: "blobs" not in header
        ),
        st.lists(st.binary(max_size=40), max_size=3),
    ),
    max_size=12,
)


async def read_all(parts: list[bytes]) -> list[frames.Frame]:
    stream = asyncio.StreamReader()
    reader = frames.FrameReader(stream)
    found: list[frames.Frame] = []

    async def feed() -> None:
        for part in parts:
            stream.feed_data(part)
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.create_task(feed())
    while arrived := await reader.read():
        found += arrived
    await feeding
    return found


@given(FRAMES, st.lists(st.integers(1, 50), max_size=30))
@settings(max_examples=150, deadline=None)
def test_frames_arrive_whole_however_the_pipe_cuts_them(sent: list[frames.Frame], cuts: list[int]) -> None:
    data = b"".join(worker_frames.encode(header, blobs) for header, blobs in sent)
    parts, at = [], 0
    for cut in (*cuts, len(data)):
        if data[at : at + cut]:
            parts.append(data[at : at + cut])
        at += cut
    assert asyncio.run(read_all(parts)) == sent


async def test_a_large_frame_between_small_ones() -> None:
    sent = [({"a": 1}, []), ({"b": "x" * 700_000}, [b"y" * 3_000_000]), ({"c": 3}, [b"z"])]
    data = b"".join(worker_frames.encode(header, blobs) for header, blobs in sent)
    parts = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]
    assert await read_all(parts) == sent


async def test_what_is_no_frame_is_refused_and_a_cut_one_is_the_end() -> None:
    whole = worker_frames.encode({"a": 1}, [b"blob"])
    assert await read_all([whole + whole[:-1]]) == [({"a": 1}, [b"blob"])]
    too_large = frames.PREFIX.pack(frames.MAX_FRAME_BYTES, 1)
    for nonsense in (too_large + b"x", frames.PREFIX.pack(2, 0) + b"[]", frames.PREFIX.pack(3, 0) + b"abc"):
        with pytest.raises(ValueError, match=r"over|object|JSON|Expecting"):
            await read_all([nonsense])


def test_a_worker_reads_what_the_host_writes() -> None:
    calls = {"calls": [{"id": 1, "op": "step", "action": {"text": "ä\u2028"}}, {"id": 2, "op": "close"}]}
    assert worker_frames.read(io.BytesIO(frames.encode(calls))) == (calls, [])
