"""100 requests at once during 20 changes of weights: every token is of the version that its span names (B77,
B78, B80). Each is scored again by transformers and peft under that version, over the whole sequence before
it, so a cache that outlived a change would show too.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from services.inference.tests.adapters_for_tests import write_adapter
from services.inference.tests.engine_helpers import PROMPT
from services.inference.tests.serving import Client, Reply, publish, serving

from opentinker_inference.ports import Weights
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.errors import InvalidArgument, UnsupportedOption

SWAPS = 20
REQUESTS = 100
IN_FLIGHT = 30
APART = 0.1
TOLERANCE = 2e-4
SwapPolicy: TypeAlias = sampling_pb2.SwapPolicy.ValueType
CONTINUE = sampling_pb2.SWAP_POLICY_CONTINUE

VLLM = {"engine": "vllm", "dtype": "float32", "kv_cache_bytes": 128 << 20, "max_rows": 128}
LIMITS = {"context_tokens": 256, "max_lora_rank": 8}


class Judge:
    """Adapters 1 to 20 of a policy, and what transformers and peft say of tokens under each."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self.paths = {
            version: write_adapter(folder / str(version), model_dir, seed=version, rank=8, std=0.2)
            for version in range(1, SWAPS + 1)
        }
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model = PeftModel.from_pretrained(model, str(self.paths[1]), adapter_name="1")
        for version, path in list(self.paths.items())[1:]:
            self._model.load_adapter(str(path), adapter_name=str(version))
        self._model.eval()

    def score(self, version: int, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Logprob of each token of each row after the prompt."""
        self._model.set_adapter(str(version))
        longest = max(map(len, rows))
        ids = torch.tensor([[*PROMPT, *row, *[0] * (longest - len(row))] for row in rows])
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(ids).logits[:, len(PROMPT) - 1 : -1], dim=-1)
        picked = logprobs.gather(2, ids[:, len(PROMPT) :, None])[:, :, 0].tolist()
        return [scores[: len(row)] for scores, row in zip(picked, rows, strict=True)]


@dataclass
class Arena:
    """A server, and how many requests ran at each load of a version."""

    client: Client
    judge: Judge
    in_flight: list[int] = field(default_factory=list)

    def request(self, name: str, version: int, policy: SwapPolicy, tokens: int) -> pb.SampleRequest:
        request = self.client.request(
            name, PROMPT, version=version, seed=zlib.crc32(name.encode()), max_tokens=tokens, ignore_eos=True
        )
        request.swap_policy = policy
        return request

    async def load(self, version: int, policy: SwapPolicy) -> None:
        named = self.client.request("", version=version).model.policy_version
        request = pb.LoadPolicyVersionRequest(policy_version=named, swap_policy=policy)
        await self.client.stub.LoadPolicyVersion(request)


@pytest.fixture(scope="module")
def judge(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Neighbours differ on a probe by far more than two engines do on the same weights."""
    made = Judge(tiny_model_dir, tmp_path_factory.mktemp("adapters"))
    scores = [made.score(version, [tuple(b"4, because two and two")])[0] for version in made.paths]
    for older, newer in itertools.pairwise(scores):
        assert apart(older, newer) > APART
    return made


def apart(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


@contextlib.asynccontextmanager
async def arena(model_dir: Path, work_dir: Path, judge: Judge, **settings: object) -> AsyncIterator[Arena]:
    async with serving(model_dir, work_dir / "state", **LIMITS, **settings) as client:  # type: ignore[arg-type]
        for version, path in judge.paths.items():
            await publish(client.objects, client.policy, version, path)
        made = Arena(client, judge)
        engine = client.server.engine
        load = engine.load

        async def counted(weights: Weights) -> float:
            made.in_flight.append(client.server.domain.book.running)
            return await load(weights)

        engine.load = counted  # type: ignore[method-assign]
        yield made


def check(judge: Judge, replies: list[Reply]) -> None:
    """Every run of tokens is what the version of its span gives, and no other near it does."""
    spans = defaultdict(list)
    for reply in replies:
        end = 0
        for span in reply.completions[0].version_spans:
            assert span.start == end < span.end
            end = span.end
            spans[span.version].append((reply, span))
        assert end == len(reply.ids())
    told_apart = 0
    for version, found in spans.items():
        rows = [reply.ids()[: span.end] for reply, span in found]
        right, wrong = judge.score(version, rows), judge.score(version % SWAPS + 1, rows)
        for place, (reply, span) in enumerate(found):
            got = reply.logprobs()[span.start : span.end]
            assert got == pytest.approx(right[place][span.start :], abs=TOLERANCE), (version, span)
            told_apart += apart(got, wrong[place][span.start :]) > APART
    # Of a few short spans any version would say about the same.
    assert told_apart >= 0.8 * sum(map(len, spans.values()))


async def pinned(found: Arena) -> list[Reply]:
    """100 callers, each with one request after another until 20 swaps have found 30 or more running: nobody's
    version is replaced while he runs.
    """
    drain = sampling_pb2.SWAP_POLICY_DRAIN
    replies = []
    arrived = asyncio.Barrier(REQUESTS)

    async def call(caller: int) -> None:
        await arrived.wait()
        for turn in itertools.count():
            version = (caller + 7 * turn) % SWAPS + 1
            reply = await found.client.send(found.request(f"{caller}-{turn}", version, drain, 8))
            assert [span.version for span in reply.completions[0].version_spans] == [version]
            replies.append(reply)
            if sum(running >= IN_FLIGHT for running in found.in_flight) >= SWAPS:
                return

    await asyncio.gather(*(call(caller) for caller in range(REQUESTS)))
    return replies


async def continued(found: Arena) -> list[Reply]:
    """100 callers, each with one request after another of what is newest, under which the next is loaded."""
    await found.load(1, CONTINUE)
    found.in_flight.clear()
    newest, tokens = 1, 60
    over = False
    replies = []

    async def call(caller: int) -> None:
        for turn in itertools.count():
            replies.append(
                await found.client.send(found.request(f"go-{caller}-{turn}", newest, CONTINUE, tokens))
            )
            if over:
                return

    async with asyncio.TaskGroup() as group:
        for caller in range(REQUESTS):
            group.create_task(call(caller))
        # A change that comes just as most have ended does not count; the test's time limit ends it.
        for version in itertools.cycle([*range(2, SWAPS + 1), 1]):
            await asyncio.sleep(0.05)
            newest = version
            await found.load(version, CONTINUE)
            if sum(running >= IN_FLIGHT for running in found.in_flight) >= SWAPS:
                break
        over = True
    assert {len(reply.ids()) for reply in replies} == {tokens}, "a budget was restored (B83)"
    assert sum(len(reply.completions[0].version_spans) > 1 for reply in replies) >= REQUESTS // 2
    return replies


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["merged", "adapter"])
async def test_requests_during_swaps(mode: str, tiny_model_dir: Path, judge: Judge, tmp_path: Path) -> None:
    options = {"serving_mode": mode, "max_resident_versions": 3, "threads": 1, "max_rows": 128}
    async with arena(tiny_model_dir, tmp_path, judge, **options) as found:
        check(judge, await pinned(found))


async def test_an_engine_that_cannot_go_on_says_so_by_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, engine="noop", serving_mode="merged") as client:
        capabilities = await client.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert not capabilities.swap_policies
        request = client.request("r", version=1)
        request.swap_policy = CONTINUE
        error = await client.failure(request)
        assert isinstance(error, UnsupportedOption)
        assert error.field == "swap_policy"
        request.swap_policy = 9  # type: ignore[assignment]
        error = await client.failure(request)
        assert isinstance(error, InvalidArgument)
        assert error.field == "swap_policy"
        # Nor can it where the engine could but the request could not.
        engine = client.server.engine
        engine._info = dataclasses.replace(engine.info(), continues=True)
        request.swap_policy = CONTINUE
        checkpoint = sampling_pb2.ModelRef(checkpoint=f"{client.policy}/checkpoints/c1")
        for model in (sampling_pb2.ModelRef(base_model=client.base_model), checkpoint):
            request.model.CopyFrom(model)
            error = await client.failure(request)
            assert isinstance(error, UnsupportedOption)
            assert error.field == "swap_policy"
        request = client.request("scores", version=1, prompt_logprobs=True)
        request.swap_policy = CONTINUE
        error = await client.failure(request)
        assert isinstance(error, UnsupportedOption)
        assert error.field == "swap_policy"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_vllm_requests_during_swaps(tiny_model_dir: Path, judge: Judge, tmp_path: Path) -> None:
    async with arena(tiny_model_dir, tmp_path, judge, serving_mode="merged", **VLLM) as found:
        capabilities = await found.client.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert CONTINUE in capabilities.swap_policies
        check(judge, await pinned(found))
        check(judge, await continued(found))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_vllm_requests_during_changes_of_adapters(
    tiny_model_dir: Path, judge: Judge, tmp_path: Path
) -> None:
    options = {**VLLM, "serving_mode": "adapter", "max_resident_versions": 4}
    async with arena(tiny_model_dir, tmp_path, judge, **options) as found:
        check(judge, await pinned(found))
