"""The engine contract on vLLM, through its child process: one start for each serving mode."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from services.inference.tests.adapters_for_tests import write_adapter
from services.inference.tests.engine_helpers import PROMPT, collect, job, reference_logprobs
from services.inference.tests.test_engine_contract import CONTEXT, EngineContract, Running

from opentinker_inference.adapters.engine_process import CHILD, EngineClient, engine_environment
from opentinker_inference.domain.sampling import EngineInfo, SampleDone
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineProcess
from opentinkerapi.runtime.reasons import Reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def make_client(model_dir: Path, log_path: Path, mode: str) -> EngineClient:
    config = EngineConfig(
        engine="vllm",
        model_dir=model_dir,
        context_tokens=CONTEXT,
        dtype="float32",
        serving_mode=mode,
        max_lora_rank=8,
        kv_cache_bytes=64 << 20,
        max_rows=32,
    )
    process = EngineProcess(CHILD, env=engine_environment("vllm"), log_path=log_path)
    return EngineClient(process, config, 240)


@pytest.mark.asyncio(loop_scope="class")
class VllmContract(EngineContract):
    """The contract, and what only vLLM needs."""

    mode = ""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def started(
        cls, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[tuple[EngineClient, EngineInfo]]:
        client = make_client(tiny_model_dir, tmp_path_factory.mktemp("vllm") / "engine.log", cls.mode)
        try:
            yield client, await client.start()
        finally:
            await client.close()

    @pytest.fixture
    def running(
        self, started: tuple[EngineClient, EngineInfo], tiny_model_dir: Path, tmp_path: Path
    ) -> Running:
        client, info = started
        assert info.serving_mode == self.mode
        return Running(client, info, tiny_model_dir, tmp_path)

    async def test_more_prompt_tokens_than_one_step_takes(self, running: Running) -> None:
        # A prompt that is split over two steps kills vLLM on CPU where its request has a seed.
        await running.base()
        prompts = [[(7 * i + j) % 250 for j in range(100)] for i in range(100)]
        got = await asyncio.gather(
            *(
                collect(running.engine, job(f"many-{i}", prompt, seed=i, max_tokens=2))
                for i, prompt in enumerate(prompts)
            )
        )
        assert len(got) == len(prompts)

    async def test_n_completions_share_one_prefill(self, running: Running) -> None:
        """Whole blocks of the prompt are computed once, although all arrive together."""
        await running.base()
        prompt = [(11 * i) % 250 for i in range(100)]
        done = [
            event
            async for event in running.engine.sample(job("group", prompt, n=4))
            if isinstance(event, SampleDone)
        ]
        assert done[0].cached_prompt_tokens == 96

    async def test_requests_around_a_swap_each_match_one_version(self, running: Running) -> None:
        # B80 on the engine itself: load, run, load, run, with the same prompt and seed.
        paths = {key: await running.load(key, rank=4, seed=i) for i, key in enumerate(("s1", "s2"))}
        for turn, key in enumerate(("s1", "s2", "s1", "s2")):
            await running.load(key, rank=4)
            got = await asyncio.gather(
                *(collect(running.engine, job(f"{turn}-{i}", weights=key, seed=i, n=2)) for i in range(6))
            )
            for completions in got:
                for one in completions.values():
                    want = reference_logprobs(running.model_dir, paths[key], PROMPT, one.token_ids)
                    assert one.logprobs == pytest.approx(want, abs=self.tolerance)


class TestVllmAdapter(VllmContract):
    mode = "adapter"


class TestVllmMerged(VllmContract):
    mode = "merged"

    async def test_unreadable_weights_change_nothing(self, running: Running, tmp_path: Path) -> None:
        await running.base()
        before = await collect(running.engine, job("before", seed=1))
        with pytest.raises(ServiceError) as caught:
            await running.engine.load(Weights("broken", tmp_path / "nothing here"))
        assert caught.value.reason is Reason.INVALID_WEIGHTS
        after = await collect(running.engine, job("after", seed=1))
        assert after[0].token_ids == before[0].token_ids

    async def test_a_layer_that_only_the_last_adapter_changed_goes_back(
        self, running: Running, tmp_path: Path
    ) -> None:
        wide = write_adapter(tmp_path / "wide", running.model_dir)
        narrow = write_adapter(tmp_path / "narrow", running.model_dir, targets=("q_proj",))
        await running.engine.load(Weights("wide", wide, 4))
        await running.engine.load(Weights("narrow", narrow, 4))
        got = (await collect(running.engine, job("narrow", seed=1, weights="narrow")))[0]
        want = reference_logprobs(running.model_dir, narrow, PROMPT, got.token_ids)
        assert got.logprobs == pytest.approx(want, abs=self.tolerance)
