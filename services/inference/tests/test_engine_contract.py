"""One contract for every engine; each subclass runs it on a real one.

The vLLM classes are slow and start their engine once.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from services.inference.tests.engine_helpers import PROMPT, collect, job, prompt_scores, reference_logprobs
from services.inference.tests.running import Running, bytes_of, token_of
from services.inference.tests.sampling_contract import SamplingContract

from opentinker_inference.domain.sampling import SampleJob, StopReason
from opentinker_inference.engine.transformers_engine import TransformersEngine
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinker_kit.testing.models import build_tiny_qwen3
from opentinkerapi.runtime.reasons import Reason

CONTEXT = 256


class EngineContract(SamplingContract):
    """What every engine promises."""

    tolerance = 1e-4

    async def test_logprobs_are_those_of_the_sampled_tokens(self, running: Running) -> None:
        # B53: not of the likeliest token. At temperature 1 most sampled tokens are not the argmax.
        await running.base()
        got = await collect(running.engine, job(n=6, seed=11, max_tokens=12, top_logprobs=3))
        argmax_misses = 0
        for completion in got.values():
            want = reference_logprobs(running.model_dir, None, PROMPT, completion.token_ids)
            assert len(completion.logprobs) == len(completion.token_ids) == 12
            assert completion.logprobs == pytest.approx(want, abs=self.tolerance)
            for token, logprob, ids, tops in zip(
                completion.token_ids,
                completion.logprobs,
                completion.top_ids,
                completion.top_logprobs,
                strict=True,
            ):
                assert len(ids) == len(tops) == 3
                assert list(tops) == sorted(tops, reverse=True)
                if token in ids:
                    assert tops[ids.index(token)] == pytest.approx(logprob, abs=1e-6)
                argmax_misses += token != ids[0]
        assert argmax_misses > 10

    async def test_same_seed_same_tokens_and_completion_i_has_seed_plus_i(self, running: Running) -> None:
        await running.base()
        group = await collect(running.engine, job("a", n=4, seed=100))
        again = await collect(running.engine, job("b", n=4, seed=100))
        assert {i: c.token_ids for i, c in group.items()} == {i: c.token_ids for i, c in again.items()}
        for index in range(4):
            alone = await collect(running.engine, job(f"c{index}", seed=100 + index))
            assert alone[0].token_ids == group[index].token_ids
        assert len({c.token_ids for c in group.values()}) > 1

    async def test_only_missing_completions_are_sampled(self, running: Running) -> None:
        await running.base()
        whole = await collect(running.engine, job("a", n=4, seed=7))
        request = job("b", n=4, seed=7)
        part = await collect(
            running.engine,
            SampleJob("b", "", request.prompt, (1, 3), request.params, ()),
        )
        assert {i: part[i].token_ids for i in (1, 3)} == {i: whole[i].token_ids for i in (1, 3)}

    async def test_temperature_scales_what_is_sampled_and_reported(self, running: Running) -> None:
        await running.base()
        got = (await collect(running.engine, job(seed=3, temperature=0.5, max_tokens=16)))[0]
        want = reference_logprobs(running.model_dir, None, PROMPT, got.token_ids, 0.5)
        assert got.logprobs == pytest.approx(want, abs=2 * self.tolerance)

    async def test_greedy(self, running: Running) -> None:
        await running.base()
        got = (await collect(running.engine, job(temperature=0.0, top_logprobs=1)))[0]
        assert [ids[0] for ids in got.top_ids] == list(got.token_ids)
        assert got.logprobs == pytest.approx(
            reference_logprobs(running.model_dir, None, PROMPT, got.token_ids), abs=self.tolerance
        )

    @pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.4}])
    async def test_truncated_support_is_renormalised(
        self, running: Running, option: dict[str, float]
    ) -> None:
        # B52: the logprob is of the distribution sampled from, so the kept tokens' probabilities sum to 1.
        await running.base()
        got = (await collect(running.engine, job(seed=5, top_logprobs=40, max_tokens=12, **option)))[0]
        raw = reference_logprobs(running.model_dir, None, PROMPT, got.token_ids)
        assert sum(lp - r for lp, r in zip(got.logprobs, raw, strict=True)) > 0.5
        for ids, tops, token in zip(got.top_ids, got.top_logprobs, got.token_ids, strict=True):
            kept = {i: t for i, t in zip(ids, tops, strict=True) if t > -1e9}
            assert token in kept
            if "top_k" in option:
                assert len(kept) == 5
            if len(kept) < 40:
                assert sum(math.exp(t) for t in kept.values()) == pytest.approx(1.0, abs=1e-3)

    async def test_end_token_ends_and_is_the_last_token(self, running: Running) -> None:
        await running.base()
        free = (await collect(running.engine, job(seed=21, max_tokens=8)))[0]
        end = free.token_ids[3]
        first = free.token_ids.index(end)
        got = (await collect(running.engine, job(seed=21, max_tokens=8, end=(end,))))[0]
        assert got.stop_reason is StopReason.END
        assert got.token_ids == free.token_ids[: first + 1]
        ignored = (await collect(running.engine, job(seed=21, max_tokens=8, end=(end,), ignore_eos=True)))[0]
        assert ignored.token_ids == free.token_ids
        assert ignored.stop_reason is StopReason.LENGTH
        asked = (await collect(running.engine, job(seed=21, max_tokens=8, stop_token_ids=(end,))))[0]
        assert asked.stop_reason is StopReason.STOP
        assert asked.token_ids == got.token_ids

    async def test_stop_string_over_two_tokens(self, running: Running) -> None:
        # B73: ids and logprobs stay whole and equally long; the front cuts the text.
        await running.base()
        letters = tuple((token_of(c), 100.0) for c in "abcdefghijklmnopqrstuvwxyz")
        options = {"seed": 2, "logit_bias": letters, "temperature": 2.0, "max_tokens": 24}
        free = (await collect(running.engine, job("free", **options)))[0]
        text = bytes_of(free.token_ids)
        stop = text[6:8]
        got = (await collect(running.engine, job("stopped", stop=("zzz", stop), **options)))[0]
        assert got.stop_reason is StopReason.STOP
        assert got.matched_stop == stop
        assert len(got.token_ids) == len(got.logprobs) == text.index(stop) + 2

    async def test_bias_bad_words_and_penalties_reach_the_engine(self, running: Running) -> None:
        await running.base()
        only = token_of("q")
        forced = (await collect(running.engine, job(logit_bias=((only, 100.0),))))[0]
        assert set(forced.token_ids) == {only}
        banned = (await collect(running.engine, job("b", logit_bias=((only, 100.0),), bad_words=("q",))))[0]
        assert only not in banned.token_ids
        plain = (await collect(running.engine, job("p", max_tokens=24, temperature=0.0)))[0]
        for name, value in (
            ("presence_penalty", 2.0),
            ("frequency_penalty", 2.0),
            ("repetition_penalty", 5.0),
        ):
            got = (
                await collect(
                    running.engine,
                    job(name, max_tokens=24, temperature=0.0, **{name: value}),
                )
            )[0]
            assert got.token_ids != plain.token_ids, name

    async def test_prompt_logprobs_and_scoring(self, running: Running) -> None:
        from opentinker_inference.domain.sampling import ScoreJob

        await running.base()
        scores = await prompt_scores(running.engine, job(prompt_logprobs=True))
        want = reference_logprobs(running.model_dir, None, PROMPT[:1], PROMPT[1:])
        assert math.isnan(scores[0])
        assert scores[1:] == pytest.approx(want, abs=self.tolerance)
        long = tuple(i % 250 for i in range(200))
        both = await running.engine.score(ScoreJob("s", "", (PROMPT, long)))
        assert both[0][1:] == pytest.approx(want, abs=self.tolerance)
        assert both[1][1:] == pytest.approx(
            reference_logprobs(running.model_dir, None, long[:1], long[1:]), abs=self.tolerance
        )

    async def test_an_adapter_changes_what_it_should(self, running: Running) -> None:
        # B86: equal to peft within 1e-4, and different from the base; alpha and rank are honoured.
        await running.base()
        base = (await collect(running.engine, job("base", seed=1, max_tokens=12)))[0]
        for key, adapter in (
            ("v1", {"rank": 4, "alpha": 32.0}),
            ("v2", {"rank": 8, "alpha": 4.0, "seed": 3}),
        ):
            path = await running.load(key, **adapter)
            got = (await collect(running.engine, job(key, seed=1, max_tokens=12, weights=key)))[0]
            want = reference_logprobs(running.model_dir, path, PROMPT, got.token_ids)
            assert got.logprobs == pytest.approx(want, abs=self.tolerance)
            unadapted = reference_logprobs(running.model_dir, None, PROMPT, got.token_ids)
            assert max(abs(a - b) for a, b in zip(want, unadapted, strict=True)) > 10 * self.tolerance
        await running.base()
        after = (await collect(running.engine, job("after", seed=1, max_tokens=12)))[0]
        assert after.token_ids == base.token_ids
        assert after.logprobs == pytest.approx(base.logprobs, abs=1e-6)

    async def test_a_whole_model_replaces_every_weight(self, running: Running, tmp_path: Path) -> None:
        if running.info.serving_mode != "merged":
            pytest.skip("served merged only")
        await running.base()
        base = await collect(running.engine, job("base", n=4, seed=1, max_tokens=12))
        whole = build_tiny_qwen3(tmp_path / "whole", seed=5)
        await running.engine.load(Weights("whole", whole, full=True))
        got = (await collect(running.engine, job("whole", seed=1, max_tokens=12, weights="whole")))[0]
        want = reference_logprobs(whole, None, PROMPT, got.token_ids)
        assert got.logprobs == pytest.approx(want, abs=self.tolerance)
        # An adapter after it starts from the base, and the base itself comes back to the bit.
        path = await running.load("v1", targets=("q_proj",))
        got = (await collect(running.engine, job("v1", seed=1, max_tokens=12, weights="v1")))[0]
        want = reference_logprobs(running.model_dir, path, PROMPT, got.token_ids)
        assert got.logprobs == pytest.approx(want, abs=self.tolerance)
        await running.engine.load(Weights("whole", whole, full=True))
        await running.base()
        after = await collect(running.engine, job("after", n=4, seed=1, max_tokens=12))
        assert {i: (c.token_ids, c.logprobs) for i, c in after.items()} == {
            i: (c.token_ids, c.logprobs) for i, c in base.items()
        }

    async def test_zero_adapter_is_the_base(self, running: Running) -> None:
        await running.base()
        base = (await collect(running.engine, job("base", seed=4)))[0]
        await running.load("zero", std=0.0)
        got = (await collect(running.engine, job("zero", seed=4, weights="zero")))[0]
        assert got.token_ids == base.token_ids
        assert got.logprobs == pytest.approx(base.logprobs, abs=1e-5)

    async def test_no_cached_prompt_crosses_versions(self, running: Running) -> None:
        # B77: the same long prompt before and after a swap.
        prompt = tuple(range(32, 96)) + PROMPT
        await running.base()
        await collect(running.engine, job("a", prompt=prompt, seed=9))
        path = await running.load("v1", rank=4, alpha=32.0)
        got = (await collect(running.engine, job("b", prompt=prompt, seed=9, weights="v1")))[0]
        want = reference_logprobs(running.model_dir, path, prompt, got.token_ids)
        assert got.logprobs == pytest.approx(want, abs=self.tolerance)

    async def test_unloaded_weights_are_refused(self, running: Running) -> None:
        with pytest.raises(ServiceError) as caught:
            await collect(running.engine, job(weights="never"))
        assert caught.value.reason is Reason.VERSION_NOT_FOUND

    async def test_cancel_frees_the_engine(self, running: Running) -> None:
        await running.base()

        async def endless() -> None:
            async for _ in running.engine.sample(job("long", n=4, max_tokens=200, ignore_eos=True)):
                pass

        task = asyncio.create_task(endless())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await collect(running.engine, job("next")))[0].token_ids) == 8


@pytest.fixture(params=["adapter", "merged"], scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestTransformersEngine(EngineContract):
    @pytest.fixture
    async def running(self, mode: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Running]:
        config = EngineConfig(
            engine="transformers",
            model_dir=tiny_model_dir,
            context_tokens=CONTEXT,
            serving_mode=mode,
            threads=1,
        )
        engine = TransformersEngine(config)
        info = await engine.start()
        assert info.serving_mode == mode
        yield Running(engine, info, tiny_model_dir, tmp_path)
        await engine.close()

    async def test_n_completions_share_one_prefill(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await running.base()
        assert isinstance(running.engine, TransformersEngine)
        model, run = running.engine._model, []
        prefill = model.prefill

        def counted(key: str, prompt: tuple[int, ...], *args: object) -> object:
            run.append(prompt)
            return prefill(key, prompt, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(model, "prefill", counted)
        prompts = [tuple(range(start, start + 40)) for start in (1, 2, 3)]
        await asyncio.gather(
            *(collect(running.engine, job(f"g{i}", prompt, n=8)) for i, prompt in enumerate(prompts))
        )
        assert sorted(run) == sorted(prompts)

    async def test_raw_logprobs(self, running: Running) -> None:
        await running.base()
        request = job(seed=5, temperature=0.5, top_k=5, raw_logprobs=True, repetition_penalty=2.0)
        got = (await collect(running.engine, request))[0]
        want = reference_logprobs(running.model_dir, None, PROMPT, got.token_ids)
        assert got.raw_logprobs == pytest.approx(want, abs=self.tolerance)
