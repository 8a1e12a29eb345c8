"""StreamSample over gRPC, on the deterministic engine in its child process."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from services.inference.tests.serving import Client, Streamed, publish_random, serving

from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.errors import Cancelled, InvalidArgument, RequestIdReused, from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    options = {"context_tokens": CONTEXT, "keep_alive_s": 0.05, "threads": 1, "max_rows": 8}
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("streaming"), **options) as client:
        yield client


_names = itertools.count()


@pytest.fixture
def client(shared: Client) -> Client:
    return shared.named(f"s{next(_names)}")


def check_joined(reply: Streamed) -> None:
    """The deltas of each completion are the completion."""
    assert reply.completions
    for index, completion in reply.completions.items():
        joined = reply.joined(index)
        assert joined.token_ids == completion.token_ids
        assert joined.logprobs == completion.logprobs
        assert joined.text == completion.text


async def test_deltas_come_token_by_token_and_join_to_what_sample_gives(client: Client) -> None:
    options: dict[str, object] = {"n": 3, "seed": 7, "max_tokens": 20, "top_logprobs": 2}
    whole = await client.sample("whole", prompt_logprobs=True, **options)
    reply = await client.stream(client.request("streamed", prompt_logprobs=True, **options))
    check_joined(reply)
    assert {i: c.SerializeToString(deterministic=True) for i, c in reply.completions.items()} == {
        i: c.SerializeToString(deterministic=True) for i, c in whole.completions.items()
    }
    assert reply.prompt_logprobs[1:] == whole.prompt_logprobs[1:]
    assert reply.started == whole.started
    assert 0 < reply.engine_s < 10
    # The three run together, and each is told as it grows.
    assert len({delta.index for delta in reply.deltas[:6]}) == 3
    for delta in reply.deltas:
        if delta.token_ids:
            assert unpack(delta.top_token_ids).shape == (len(delta.token_ids) // 4, 2)
    tops = [unpack(d.top_logprobs) for d in reply.deltas if d.index == 1 and d.token_ids]
    assert sum(map(len, tops)) == 20


async def test_a_version_stands_beside_its_tokens(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    await publish_random(client.objects, client.policy, 3, tiny_model_dir, tmp_path)
    reply = await client.stream(client.request("r1", version=3, max_tokens=6, ignore_eos=True))
    spans = reply.joined().version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == 6
    assert {span.version for span in spans} == {3}


async def test_b73_text_is_of_whole_characters_and_without_the_stop_string(client: Client) -> None:
    """Only the four bytes of an emoji can be sampled, so that few characters are whole."""
    ids = (await client.stub.Tokenize(pb.TokenizeRequest(text="\N{GRINNING FACE}"))).token_ids
    tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
    options: dict[str, object] = {"logit_bias": dict.fromkeys(tokens, 100.0), "temperature": 2.0}
    reply = await client.stream(client.request("emoji", seed=0, max_tokens=400, n=4, **options))
    check_joined(reply)
    given = [delta.text for delta in reply.deltas]
    assert any("\N{GRINNING FACE}" in text for text in given)
    # A stop string over several tokens and so over several deltas.
    text = (await client.sample("text", seed=5, max_tokens=60)).completions[0].text
    stop = text[20:24]
    for include in (False, True):
        request = client.request(
            f"stop-{include}", seed=5, max_tokens=60, stop=["never", stop], include_stop_in_output=include
        )
        reply = await client.stream(request)
        check_joined(reply)
        assert reply.completions[0].stop_reason == sampling_pb2.STOP_REASON_STOP
        assert reply.completions[0].matched_stop == stop
        assert reply.joined().text == text[: text.index(stop)] + (stop if include else "")


# One request under one id


async def test_a_repetition_begins_with_what_is_kept(client: Client) -> None:
    request = client.request("r1", n=2, max_tokens=30, ignore_eos=True)  # no seed: drawn once
    first = await client.stream(request)
    again = await client.stream(request)
    check_joined(again)
    assert again.outcome() == first.outcome() == (await client.send(request)).outcome()
    assert len(again.deltas) <= 4  # of what is there already nothing is held back
    other = client.request("r1", n=2, max_tokens=5)
    with pytest.raises(RequestIdReused):
        await client.stream(other)


async def test_readers_join_at_any_time(client: Client) -> None:
    request = client.request("r1", n=2, max_tokens=120, ignore_eos=True)
    early = asyncio.create_task(client.stream(request))
    call = client.stub.StreamSample(pb.StreamSampleRequest(sample=request))
    for _ in range(8):
        await call.read()
    call.cancel()  # who leaves takes nothing along
    late = await client.stream(request)
    whole = await client.send(request)
    check_joined(late)
    check_joined(await early)
    assert late.outcome() == (await early).outcome() == whole.outcome()


async def test_what_sample_began_can_be_streamed(client: Client) -> None:
    request = client.request("r1", n=2, max_tokens=60, ignore_eos=True)
    sample = asyncio.create_task(client.send(request))
    await asyncio.sleep(0)
    reply = await client.stream(request)
    check_joined(reply)
    assert reply.outcome() == (await sample).outcome()


# Ends


async def read_all(call: AsyncIterator[object]) -> None:
    async for _ in call:
        pass


async def running_rows(client: Client) -> int:
    models = (await client.stub.ListModels(pb.ListModelsRequest())).models
    return sum(model.running_requests for model in models)


async def idle(client: Client) -> None:
    """Wait until no request runs; bounded by the test's timeout."""
    while await running_rows(client) or client.server.domain.book.running:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_cancel_ends_a_stream_and_frees_its_slot(client: Client) -> None:
    request = client.request("r1", n=8, max_tokens=CONTEXT, ignore_eos=True)  # every row of the engine
    call = client.stub.StreamSample(pb.StreamSampleRequest(sample=request))
    events = aiter(call)
    while (await anext(events)).WhichOneof("event") != "delta":
        pass
    await client.stub.CancelSample(pb.CancelSampleRequest(request_id=client.id("r1")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(events)
    assert isinstance(from_rpc_error(caught.value), Cancelled)
    await idle(client)
    assert (await client.sample("r2")).ids()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_deadline_ends_the_request_and_frees_its_slot(client: Client, streamed: bool) -> None:
    request = client.request(f"r{streamed}", n=8, max_tokens=CONTEXT, ignore_eos=True)
    if streamed:
        call = client.stub.StreamSample(pb.StreamSampleRequest(sample=request), timeout=0.3)
    else:
        call = client.stub.Sample(request, timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(client)
    # Sent again with more patience it is sampled.
    assert len((await client.send(request)).completions) == 8


async def test_a_deadline_does_not_end_what_another_waits_for(client: Client) -> None:
    request = client.request("r1", n=4, max_tokens=CONTEXT, ignore_eos=True)
    patient = asyncio.create_task(client.stream(request))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(client.stub.StreamSample(pb.StreamSampleRequest(sample=request), timeout=0.2))
    reply = await patient
    check_joined(reply)
    assert len(reply.ids()) == reply.started.params.max_tokens


async def test_a_reader_who_stops_reading_holds_up_nobody(client: Client) -> None:
    """Its request goes on to its end; others run; what it had not read is kept once, not for it."""
    request = client.request("stalled", n=8, max_tokens=CONTEXT, ignore_eos=True, top_logprobs=256)
    call = client.stub.StreamSample(pb.StreamSampleRequest(sample=request))
    events = aiter(call)
    await anext(events)  # and then nothing, so that the transport's window fills
    assert (await client.sample("r2")).ids()
    await idle(client)
    # The reader goes on where it was, and misses nothing.
    reply = Streamed()
    async for response in events:
        if response.HasField("delta"):
            reply.deltas.append(response.delta)
        elif response.HasField("completion"):
            reply.completions[response.completion.index] = response.completion
    check_joined(reply)
    assert len(reply.completions) == 8
    # What the transport had not taken came in fewer pieces.
    assert len(reply.deltas) < 0.9 * 8 * CONTEXT


async def test_what_is_wrong_is_refused_before_anything_is_streamed(client: Client) -> None:
    request = client.request("r1", max_tokens=0)
    with pytest.raises(InvalidArgument) as caught:
        await client.stream(request)
    assert caught.value.field == "params.max_tokens"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read_all(client.stub.StreamSample(pb.StreamSampleRequest()))
    error = from_rpc_error(refused.value)
    assert (error.reason, error.field) == (Reason.REQUIRED_FIELD, "sample")
