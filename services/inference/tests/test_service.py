"""The service over gRPC, on the deterministic engine in its child process."""

import asyncio
import itertools
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc.aio import AioRpcError
from services.inference.tests.adapters_for_tests import write_adapter
from services.inference.tests.engine_helpers import reference_logprobs
from services.inference.tests.serving import (
    Client,
    prompt_of,
    publish,
    publish_random,
    serving,
)
from services.inference.tests.test_full_weights import output_adapter, write_model

from opentinker_inference.domain.leases import Leases
from opentinkerapi.data.v1 import content_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PromptTooLong,
    RequestIdReused,
    UnknownModel,
    UnsupportedOption,
)
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_ids, unpack, unpack_ids

PROMPT = tuple(b"2 + 2 = ")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """One server for most tests: starting an engine takes seconds."""
    options = {"context_tokens": 128, "keep_alive_s": 0.05, "max_resident_versions": 3, "threads": 1}
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("server"), **options) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_merged(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Client]:
    options = {"serving_mode": "merged", "threads": 1}
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("merged"), **options) as client:
        yield client


_names = itertools.count()


@pytest.fixture
def client(shared: Client) -> Client:
    return shared.named(f"t{next(_names)}")


@pytest.fixture
def merged(shared_merged: Client) -> Client:
    return shared_merged.named(f"t{next(_names)}")


# Requests and answers


async def test_sample_answers_with_everything_it_used(client: Client) -> None:
    reply = await client.sample("r1", n=3, seed=7, temperature=0.8, top_logprobs=2, prompt_logprobs=True)
    assert sorted(reply.completions) == [0, 1, 2]
    for index, completion in reply.completions.items():
        assert completion.seed == 7 + index
        assert len(completion.token_ids) == len(completion.logprobs) == 4 * 8
        assert unpack(completion.top_token_ids).shape == unpack(completion.top_logprobs).shape == (8, 2)
        assert completion.stop_reason == sampling_pb2.STOP_REASON_LENGTH
        assert not completion.version_spans
    used = reply.started.params
    assert (used.seed, used.temperature, used.top_p, used.top_k, used.max_tokens) == (7, 0.8, 1.0, -1, 8)
    assert reply.started.prompt_tokens == len(PROMPT)
    assert math.isnan(reply.prompt_logprobs[0])
    assert len(reply.prompt_logprobs) == len(PROMPT)
    assert 0 < reply.engine_s < 10


async def test_a_seed_is_made_and_echoed_where_none_was_given(client: Client) -> None:
    first = await client.sample("r1")
    again = await client.sample("r2", seed=first.started.params.seed)
    assert again.outcome() == first.outcome()


async def test_prompt_too_long_names_both_numbers(client: Client) -> None:
    # B71: also clamps, where only prompt and completion together are too long.
    error = await client.failure(client.request("r1", tuple([1] * 128)))
    assert isinstance(error, PromptTooLong)
    assert error.metadata == {"prompt_tokens": "128", "context_tokens": "128"}
    assert "128" in error.message
    reply = await client.sample("r2", tuple([1] * 126), max_tokens=50, ignore_eos=True)
    assert reply.started.params.max_tokens == 2
    assert len(reply.ids()) == 2
    assert reply.completions[0].stop_reason == sampling_pb2.STOP_REASON_LENGTH
    reply = await client.send(
        pb.SampleRequest(
            request_id=client.id("r3"),
            model=client.request("x").model,
            prompt=prompt_of(tuple([1] * 120)),
            params=sampling_pb2.SamplingParams(ignore_eos=True),
        )
    )
    assert len(reply.ids()) == 8


BAD_VALUES: dict[str, object] = {
    "max_tokens": 0,
    "temperature": -0.1,
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 1.5,
    "stop": [""],
    "stop_token_ids": [5000],
    "seed": 2**64 - 1,
    "presence_penalty": 3.0,
    "frequency_penalty": float("nan"),
    "repetition_penalty": 0.0,
    "bad_words": [" "],
    "logit_bias": {5: 1000.0},
    "top_logprobs": 257,
}


@pytest.mark.parametrize("field", sorted(BAD_VALUES))
async def test_a_bad_value_is_refused_by_name(client: Client, field: str) -> None:
    error = await client.failure(client.request("r1", **{field: BAD_VALUES[field]}))
    assert isinstance(error, InvalidArgument)
    assert error.reason == Reason.INVALID_FIELD
    assert error.field == f"params.{field}"


async def test_every_field_reaches_the_engine_or_is_refused_by_name(client: Client) -> None:
    """Walks the message: a field that is added to the proto and forgotten here fails this test."""
    changes: dict[str, object] = {
        "max_tokens": 3,
        "temperature": 0.3,
        "top_p": 0.2,
        "top_k": 2,
        "min_p": 0.5,
        "seed": 99,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 3.0,
        "logit_bias": {9: 100.0},
        "top_logprobs": 4,
        "prompt_logprobs": True,
    }
    capabilities = await client.stub.GetCapabilities(pb.GetCapabilitiesRequest())
    plain = await client.sample("plain", seed=1, max_tokens=24)
    text = plain.completions[0].text
    changes |= {
        "stop": [text[4:6]],
        "stop_token_ids": [plain.ids()[2]],
        "bad_words": [text[3]],
        "ignore_eos": True,
        "include_stop_in_output": True,
        "return_support": True,
        "json_schema": "{}",
        "raw_logprobs": True,
    }
    fields = [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields]
    assert sorted(changes) == sorted(fields)
    for name in fields:
        options = {"seed": 1, "max_tokens": 24, name: changes[name]}
        request = client.request(name, **options)
        if name not in capabilities.sampling_fields:
            error = await client.failure(request)
            assert isinstance(error, UnsupportedOption)
            assert error.field == f"params.{name}"
            continue
        reply = await client.send(request)
        if name == "top_logprobs":
            assert reply.completions[0].HasField("top_token_ids")
        elif name == "prompt_logprobs":
            assert len(reply.prompt_logprobs) == len(PROMPT)
        elif name == "raw_logprobs":
            assert len(reply.completions[0].raw_logprobs) == len(reply.completions[0].logprobs)
        elif name == "return_support":
            assert unpack_ids(reply.completions[0].support_sizes) == [0] * 24
        elif name == "ignore_eos":
            await _ignore_eos_is_honoured(client)
        elif name == "include_stop_in_output":
            cut = await client.sample("cut", seed=1, max_tokens=24, stop=[text[4:6]])
            kept = await client.sample(
                "kept", seed=1, max_tokens=24, stop=[text[4:6]], include_stop_in_output=True
            )
            assert kept.completions[0].text == cut.completions[0].text + text[4:6]
        else:
            assert reply.outcome() != plain.outcome(), name


async def _ignore_eos_is_honoured(client: Client) -> None:
    end = client.server.domain.end_token_ids[0]
    bias = {end: 100.0}
    stopped = await client.sample("eos", logit_bias=bias)
    assert stopped.ids() == (end,)
    assert stopped.completions[0].stop_reason == sampling_pb2.STOP_REASON_END
    assert stopped.completions[0].text == ""
    assert len((await client.sample("no-eos", logit_bias=bias, ignore_eos=True)).ids()) == 8


async def test_text_is_decoded_whole_and_cut_once(client: Client) -> None:
    # B73: one token a byte, so that an emoji spans four tokens.
    tokenizer = client.server.domain
    ids = unpack_ids((await client.stub.Tokenize(pb.TokenizeRequest(text="a\N{GRINNING FACE}b"))).token_ids)
    assert len(ids) == 6
    assert tokenizer.end_token_ids
    decoded = await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=pack_ids(ids)))
    assert decoded.text == "a\N{GRINNING FACE}b"
    # Only these four bytes are allowed: what is sampled is full of broken characters and whole ones.
    options = {"seed": 0, "logit_bias": dict.fromkeys(ids[1:5], 100.0), "temperature": 2.0}
    free = await client.sample("free", max_tokens=100, **options)
    whole = await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=free.completions[0].token_ids))
    assert free.completions[0].text == whole.text
    # A stop string over several tokens: text is cut once, ids and logprobs stay whole.
    text = (await client.sample("text", seed=5, max_tokens=40)).completions[0].text
    stop = text[10:13]
    cut = (await client.sample("cut", seed=5, max_tokens=40, stop=[stop])).completions[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.matched_stop == stop
    assert len(cut.token_ids) == len(cut.logprobs)


async def test_malformed_prompts_are_refused(client: Client) -> None:
    image = content_pb2.Image(inline=b"x", media_type="image/png")
    for request_id, change, kind, field in (
        ("a", {"token_ids": b""}, InvalidArgument, "prompt"),
        ("b", {"token_ids": b"123"}, InvalidArgument, "prompt.chunks[0].tokens.token_ids"),
        ("c", {"token_ids": pack_ids([100000])}, InvalidArgument, "prompt"),
        ("d", {"image": image}, UnsupportedOption, "prompt.chunks[0].image"),
    ):
        request = client.request(request_id)
        chunk = request.prompt.chunks[0]
        if "image" in change:
            chunk.image.image.CopyFrom(change["image"])  # type: ignore[arg-type]
            chunk.image.token_count = 4
        else:
            chunk.tokens.token_ids = change["token_ids"]  # type: ignore[assignment]
        error = await client.failure(request)
        assert isinstance(error, kind), request_id
        assert error.field == field


async def test_another_base_model_is_unknown(client: Client) -> None:
    request = client.request("r1")
    request.model.base_model = "gpt-2"
    assert isinstance(await client.failure(request), UnknownModel)


# Idempotency


async def test_a_replay_gets_what_was_sampled_until_acknowledged(client: Client) -> None:
    request = client.request("r1", n=2)  # no seed: sampling again would give something else
    first = await client.send(request)
    request.attempt, request.job_token = 0, "newer"
    assert (await client.send(request)).outcome() == first.outcome()
    other = client.request("r1", n=2, max_tokens=5)
    assert isinstance(await client.failure(other), RequestIdReused)
    await client.stub.AckCompletions(pb.AckCompletionsRequest(request_ids=[client.id("r1"), "unknown"]))
    assert (await client.send(request)).outcome() != first.outcome()


async def test_a_replay_joins_what_runs(client: Client) -> None:
    request = client.request("r1", n=2, max_tokens=100, ignore_eos=True)
    replies = await asyncio.gather(*(client.send(request) for _ in range(3)))
    assert replies[0].outcome() == replies[1].outcome() == replies[2].outcome()
    assert client.server.domain.book.running == 0


async def test_a_caller_who_leaves_finds_the_answer_later(client: Client) -> None:
    request = client.request("r1", max_tokens=100, ignore_eos=True)
    call = client.stub.Sample(request)
    await call.read()
    call.cancel()
    reply = await client.send(request)
    assert len(reply.ids()) == 100


async def test_cancel(client: Client) -> None:
    request = client.request("r1", n=8, max_tokens=100, ignore_eos=True)
    call = client.stub.Sample(request)
    await call.read()
    await client.stub.CancelSample(pb.CancelSampleRequest(request_id=client.id("r1")))
    with pytest.raises(AioRpcError) as caught:
        await _read_all(call)
    assert caught.value.code().name == "CANCELLED"
    assert (await client.sample("r2")).ids()
    with pytest.raises(AioRpcError) as caught:
        await client.stub.CancelSample(pb.CancelSampleRequest(request_id="never"))
    assert caught.value.code().name == "NOT_FOUND"


async def _read_all(call: grpc.aio.UnaryStreamCall[pb.SampleRequest, pb.SampleResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_keep_alives_while_nothing_finishes(client: Client) -> None:
    reply = await client.sample("r1", n=8, max_tokens=110, ignore_eos=True)
    assert reply.keep_alives > 0


# Versions


async def test_a_version_is_loaded_when_it_is_named(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    # B86 through everything: manifest, files, child, and the logprobs that come back.
    await publish(client.objects, client.policy, 0, None)
    path = await publish_random(
        client.objects, client.policy, 1, tiny_model_dir, tmp_path, rank=8, alpha=16.0
    )
    base = await client.sample("base", seed=3)
    zero = await client.sample("zero", seed=3, version=0)
    assert zero.outcome() == base.outcome()
    one = await client.sample("one", seed=3, version=1)
    want = reference_logprobs(tiny_model_dir, path, PROMPT, one.ids())
    assert one.logprobs() == pytest.approx(want, abs=1e-4)
    assert one.logprobs() != pytest.approx(base.logprobs(), abs=1e-3)
    spans = one.completions[0].version_spans
    assert [(s.start, s.end, s.version) for s in spans] == [(0, 8, 1)]
    models = (await client.stub.ListModels(pb.ListModelsRequest())).models
    assert models[0].model.base_model == client.base_model
    mine = {m.model.policy_version.version for m in models if m.model.policy_version.policy == client.policy}
    assert mine == {0, 1}
    scores = await client.stub.ScoreTokens(
        pb.ScoreTokensRequest(
            model=client.request("x", version=1).model, sequences=[prompt_of((*PROMPT, *one.ids()))]
        )
    )
    scored = np.frombuffer(scores.scores[0].logprobs, dtype="<f4")
    assert scored[len(PROMPT) :] == pytest.approx(one.logprobs(), abs=1e-4)


async def test_versions_that_cannot_be_served_are_refused(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    good = write_adapter(tmp_path / "good", tiny_model_dir)
    name = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    nan = write_adapter(
        tmp_path / "nan",
        tiny_model_dir,
        extra={
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.full(
                (4, 64), np.nan, np.float32
            )
        },
    )
    unknown = write_adapter(tmp_path / "unknown", tiny_model_dir, extra={name: np.zeros((4, 64), np.float32)})

    def configured(name: str, **config: object) -> Path:
        return write_adapter(tmp_path / name, tiny_model_dir, config=config)

    cases = {
        1: (unknown, {}, InvalidArgument, "layers.7"),
        2: (configured("dora", use_dora=True), {}, InvalidArgument, "use_dora"),
        3: (configured("alpha", lora_alpha=None), {}, InvalidArgument, "lora_alpha"),
        4: (configured("rank", r=5), {}, InvalidArgument, "rank 5"),
        5: (nan, {}, InvalidArgument, "NaN"),
        6: (good, {"base_digest": "00ff"}, InvalidArgument, "another base model"),
        7: (good, {"kind": "full"}, InvalidArgument, "config.json"),
    }
    for version, (path, facts, kind, text) in cases.items():
        await publish(client.objects, client.policy, version, path, facts=facts)
        error = await client.failure(client.request(f"r{version}", version=version))
        assert isinstance(error, kind), (version, error)
        assert text in error.message, version
    assert isinstance(await client.failure(client.request("r99", version=99)), NotFound)
    assert isinstance(
        await client.failure(client.request("bad", version=1, policy="policies/../x")), InvalidArgument
    )
    await publish(client.objects, client.policy, 8, good)
    await client.objects.put(f"{client.policy}/versions/8/adapter_model.safetensors", b"other bytes")
    assert isinstance(await client.failure(client.request("r8", version=8)), DataLoss)
    # And the server goes on.
    await publish(client.objects, client.policy, 9, good)
    assert (await client.sample("r9", version=9)).ids()


async def test_every_server_serves_each_new_version(
    client: Client, merged: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    # B79: those that training samples from and those that evaluation does, whatever their way of serving.
    for version in (1, 2, 3):
        for pool in (client, merged):
            folder = tmp_path / pool.name
            path = await publish_random(pool.objects, pool.policy, version, tiny_model_dir, folder)
            reply = await pool.sample(f"v{version}", seed=1, version=version)
            spans = reply.completions[0].version_spans
            assert [(span.start, span.end, span.version) for span in spans] == [(0, 8, version)]
            want = reference_logprobs(tiny_model_dir, path, PROMPT, reply.ids())
            assert reply.logprobs() == pytest.approx(want, abs=1e-4)
            models = (await pool.stub.ListModels(pb.ListModelsRequest())).models
            assert pool.request("x", version=version).model in [loaded.model for loaded in models]


async def test_what_only_some_servers_serve(client: Client, tiny_model_dir: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "whole", tiny_model_dir)
    await publish(client.objects, client.policy, 1, path, facts={"kind": "full"})
    error = await client.failure(client.request("r1", version=1))
    assert isinstance(error, FailedPrecondition)
    assert "serving_mode=merged" in error.message
    # The output layer beside the base: the deterministic engine adapts it, tied or not.
    options = {"extra": output_adapter(), "targets": ("q_proj", "lm_head")}
    adapter = await publish_random(client.objects, client.policy, 2, tiny_model_dir, tmp_path, **options)
    got = await client.sample("r2", version=2)
    want = reference_logprobs(tiny_model_dir, adapter, PROMPT, got.ids())
    assert got.logprobs() == pytest.approx(want, abs=1e-4)


async def test_a_local_path_is_used_where_it_matches(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", tiny_model_dir, seed=5)
    await publish(client.objects, client.policy, 1, path, local=True, upload=False)
    local = await client.sample("local", seed=1, version=1)
    stale = write_adapter(tmp_path / "b", tiny_model_dir, seed=5)
    await publish(client.objects, client.policy, 2, stale, local=True)
    write_adapter(stale, tiny_model_dir, seed=6)  # changed after the manifest: the store's files count
    stored = await client.sample("stored", seed=1, version=2)
    assert stored.outcome() == local.outcome()


async def test_load_and_unload(client: Client, tiny_model_dir: Path, tmp_path: Path) -> None:
    await publish_random(client.objects, client.policy, 1, tiny_model_dir, tmp_path)
    ref = sampling_pb2.PolicyVersionRef(policy=client.policy, version=1)
    first = await client.stub.LoadPolicyVersion(pb.LoadPolicyVersionRequest(policy_version=ref))
    again = await client.stub.LoadPolicyVersion(pb.LoadPolicyVersionRequest(policy_version=ref))
    assert first.load_time.ToNanoseconds() > 0 == again.load_time.ToNanoseconds()
    await client.stub.UnloadPolicyVersion(pb.UnloadPolicyVersionRequest(policy_version=ref))
    models = (await client.stub.ListModels(pb.ListModelsRequest())).models
    assert client.policy not in {m.model.policy_version.policy for m in models}
    assert (await client.sample("r1", version=1)).ids()


async def test_the_least_recently_used_version_makes_room(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    for version in range(1, 5):
        await publish_random(client.objects, client.policy, version, tiny_model_dir, tmp_path)
    first = [await client.sample(f"a{v}", seed=1, version=v) for v in range(1, 5)]
    models = (await client.stub.ListModels(pb.ListModelsRequest())).models
    assert [m.model.policy_version.version for m in models[1:]] == [2, 3, 4]
    many = await asyncio.gather(*(client.sample(f"b{i}", seed=1, version=1 + i % 4) for i in range(16)))
    assert [r.outcome() for r in many] == [first[i % 4].outcome() for i in range(16)]


async def test_a_merged_server_says_that_it_serves_one_version(merged: Client) -> None:
    capabilities = await merged.stub.GetCapabilities(pb.GetCapabilitiesRequest())
    assert capabilities.serving_mode == pb.SERVING_MODE_MERGED
    assert capabilities.max_resident_versions == 1
    assert not capabilities.swap_policies


async def test_a_merged_server_serves_one_policy_at_a_time(
    merged: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    mine, other = merged.policy, f"{merged.policy}-other"
    for policy in (mine, other):
        await publish_random(merged.objects, policy, 1, tiny_model_dir, tmp_path)
    call = merged.stub.Sample(merged.request("a", version=1, n=8, max_tokens=500, ignore_eos=True))
    await call.read()
    await asyncio.sleep(0.1)
    error = await merged.failure(merged.request("b", version=1, policy=other))
    assert isinstance(error, FailedPrecondition)
    assert error.reason == Reason.MERGED_ONE_VERSION
    await merged.stub.CancelSample(pb.CancelSampleRequest(request_id=merged.id("a")))
    await asyncio.sleep(0.1)
    assert (await merged.sample("b", version=1, policy=other)).ids()


# Crashes and leases


async def test_a_killed_engine_is_replaced_and_the_answer_is_the_same(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    await publish_random(client.objects, client.policy, 1, tiny_model_dir, tmp_path)
    options = {"n": 4, "seed": 2, "max_tokens": 100, "ignore_eos": True, "version": 1}
    want = await client.sample("undisturbed", **options)
    task = asyncio.create_task(client.sample("disturbed", **options))
    await asyncio.sleep(0.1)
    assert not task.done()
    os.kill(client.server.engine.child_pid, signal.SIGKILL)
    got = await asyncio.wait_for(task, 60)
    assert got.outcome() == want.outcome()


async def test_a_stale_attempt_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    request = client.request("r1")
    request.attempt = 3
    assert (await client.send(request)).ids()  # no scheduler: any number goes
    leases = Leases()
    leases.take("assignments/a", "jobs/j", 4)
    monkeypatch.setattr(client.server.domain, "leases", leases)
    error = await client.failure(request)
    assert error.reason == Reason.STALE_ATTEMPT
    request.attempt = 4
    assert (await client.send(request)).ids()


async def test_too_much_is_refused_with_a_time_to_come_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.server.domain, "_max_pending", 2)
    options = {"max_tokens": 110, "ignore_eos": True, "n": 8}
    calls = [client.stub.Sample(client.request(f"r{i}", **options)) for i in range(2)]
    for call in calls:
        await call.read()
    error = await client.failure(client.request("r3"))
    assert error.reason == Reason.OVERLOADED
    assert error.retry_after_s == 1.0
    for call in calls:
        call.cancel()


# Tokenizer


async def test_tokenizer_files_and_rendering(client: Client) -> None:
    listed = [r async for r in client.stub.GetTokenizer(pb.GetTokenizerRequest())]
    files = {f.name: f for r in listed for f in r.files}
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    capabilities = await client.stub.GetCapabilities(pb.GetCapabilitiesRequest())
    assert capabilities.tokenizer_digest == listed[0].digest
    data: dict[str, bytes] = {}
    request = pb.GetTokenizerRequest(sha256s=[f.sha256 for f in files.values()])
    async for response in client.stub.GetTokenizer(request):
        for run in response.files:
            assert len(data.get(run.name, b"")) == run.offset
            data[run.name] = data.get(run.name, b"") + run.data
    assert {name: len(content) for name, content in data.items()} == {
        name: f.size_bytes for name, f in files.items()
    }
    from opentinkerapi.runtime.render import ChatTokenizer

    local = ChatTokenizer(data)
    message = content_pb2.ChatMessage(
        role="user", content=content_pb2.Content(parts=[content_pb2.ContentPart(text="hi <|im_end|>")])
    )
    rendered = await client.stub.RenderChat(pb.RenderChatRequest(messages=[message]))
    assert unpack_ids(rendered.token_ids) == local.render([{"role": "user", "content": "hi <|im_end|>"}])
    assert tuple(capabilities.end_token_ids) == local.eos_ids
