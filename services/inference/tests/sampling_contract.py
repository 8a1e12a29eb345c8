"""What every engine promises of streams, supports and parameters; part of the engines' one contract."""

import math

import pytest
from services.inference.tests.engine_helpers import PROMPT, collect, job, read_along, reference_logits
from services.inference.tests.running import Running, bytes_of, token_of

from opentinker_inference.domain.sampling import (
    FIELDS,
    Completion,
    SamplingParams,
    StopReason,
    check_supported,
)
from opentinker_kit.errors import ServiceError
from opentinker_kit.testing.models import SPECIAL_TOKENS
from opentinkerapi.runtime.reasons import Reason

END = 256 + SPECIAL_TOKENS.index("<|im_end|>")


class SamplingContract:
    """See the module's text."""

    tolerance = 1e-4

    async def test_every_field_reaches_the_engine_or_is_refused_by_name(self, running: Running) -> None:
        """A field that is added and forgotten here, or by an engine, fails this test."""
        await running.base()
        letters = tuple((token_of(c), 100.0) for c in "abcdefghijklmnopqrstuvwxyz")
        plain = await self._one(running, "plain", logit_bias=letters)
        letter, stop = bytes_of(plain.token_ids[3:4]), bytes_of(plain.token_ids[4:6])
        changes: dict[str, dict[str, object]] = {
            "max_tokens": {"max_tokens": 3},
            "temperature": {"temperature": 0.2},
            "top_p": {"top_p": 0.2},
            "top_k": {"top_k": 2},
            "min_p": {"min_p": 0.6},
            "stop": {"stop": (stop,)},
            "stop_token_ids": {"stop_token_ids": (plain.token_ids[2],)},
            "seed": {"seed": 99},
            "presence_penalty": {"presence_penalty": 2.0},
            "frequency_penalty": {"frequency_penalty": 2.0},
            "repetition_penalty": {"repetition_penalty": 3.0},
            "bad_words": {"bad_words": (letter,)},
            "logit_bias": {"logit_bias": ((9, 100.0),)},
            "top_logprobs": {"top_logprobs": 4},
            "return_support": {"return_support": True},
            "raw_logprobs": {"raw_logprobs": True},
            "json_schema": {"json_schema": '{"enum": ["a"]}'},
        }
        # These have tests of their own; the last is for the front, which has the text.
        elsewhere = {"ignore_eos", "prompt_logprobs", "include_stop_in_output"}
        assert set(changes) | elsewhere == set(FIELDS)
        for name, change in changes.items():
            if name not in running.info.sampling_fields:
                params = SamplingParams(**change)  # type: ignore[arg-type]
                with pytest.raises(ServiceError) as caught:
                    check_supported(params, running.info.sampling_fields, running.info.engine)
                assert caught.value.reason is Reason.UNSUPPORTED_OPTION
                assert [field for field, _ in caught.value.violations] == [f"params.{name}"]
                continue
            options: dict[str, object] = {"logit_bias": letters} | change
            changed = await self._one(running, name, **options)
            assert (changed.token_ids, changed.top_ids, changed.support_sizes, changed.raw_logprobs) != (
                plain.token_ids,
                (),
                (),
                (),
            ), name

    async def test_deltas_join_to_the_completion(self, running: Running) -> None:
        await running.base()
        whole = await collect(running.engine, job("w", n=3, seed=5, max_tokens=12, top_logprobs=2))
        request = job("s", n=3, seed=5, max_tokens=12, top_logprobs=2, stream=True)
        for index, (completion, deltas) in (await read_along(running.engine, request)).items():
            assert completion.token_ids == whole[index].token_ids
            assert completion.logprobs == pytest.approx(whole[index].logprobs, abs=self.tolerance)
            assert len(deltas) >= 3  # not all at the end
            assert len(completion.top_ids) == 12

    async def test_a_stop_string_ends_a_stream_with_ids_and_logprobs_whole(self, running: Running) -> None:
        # B73
        await running.base()
        letters = tuple((token_of(c), 100.0) for c in "abcdefghijklmnopqrstuvwxyz")
        options = {"seed": 2, "logit_bias": letters, "temperature": 2.0, "max_tokens": 24}
        text = bytes_of((await collect(running.engine, job("free", **options)))[0].token_ids)
        stop = text[6:9]
        request = job("stopped", stop=(stop, "zzz"), stream=True, **options)
        completion, deltas = (await read_along(running.engine, request))[0]
        assert completion.stop_reason is StopReason.STOP
        assert completion.matched_stop == stop
        assert bytes_of(completion.token_ids) == text[: text.index(stop) + 3]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert sum(len(delta.token_ids) for delta in deltas) < len(completion.token_ids)

    @pytest.mark.parametrize(
        "option",
        [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_k": 20, "top_p": 0.7, "temperature": 0.5}],
    )
    async def test_the_support_is_what_the_logprob_is_over(
        self, running: Running, option: dict[str, float]
    ) -> None:
        # B52: a trainer that renormalises over these ids gets the sampler's logprob.
        await running.base()
        got = await self._one(running, "s", seed=5, max_tokens=12, return_support=True, **option)
        assert len(got.support_sizes) == len(got.token_ids)
        assert sum(got.support_sizes) == len(got.support_ids)
        logits = reference_logits(running.model_dir, None, [*PROMPT, *got.token_ids])
        at = 0
        for place, size in enumerate(got.support_sizes):
            ids = list(got.support_ids[at : at + size])
            at += size
            assert 0 < size <= option.get("top_k", 256) + 2  # ties are kept
            assert got.token_ids[place] in ids
            scaled = logits[len(PROMPT) + place - 1] / option.get("temperature", 1.0)
            want = scaled[got.token_ids[place]] - scaled[ids].logsumexp(-1)
            assert got.logprobs[place] == pytest.approx(float(want), abs=2 * self.tolerance)

    async def test_where_nothing_is_cut_off_the_support_says_so(self, running: Running) -> None:
        await running.base()
        for name, option in (("full", {}), ("greedy", {"temperature": 0.0, "top_p": 0.5})):
            got = await self._one(running, name, return_support=True, **option)
            assert got.support_sizes == (0,) * len(got.token_ids)
            assert got.support_ids == ()
        # More ids than are listed: the vocabulary has over 256, and few of them are cut off.
        got = await self._one(running, "many", return_support=True, top_p=0.9999, temperature=2.0)
        assert set(got.support_sizes) <= {0, -1}

    async def test_a_schema_is_followed_to_the_end_token(self, running: Running) -> None:
        if "json_schema" not in running.info.sampling_fields:
            pytest.skip("refused by name")
        await running.base()
        schema = (
            '{"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], '
            '"additionalProperties": false}'
        )
        options: dict[str, object] = {"max_tokens": 40, "json_schema": schema, "end": (END,)}
        got = await collect(running.engine, job("schema", n=4, seed=3, **options))  # type: ignore[arg-type]
        texts = {bytes_of(completion.token_ids[:-1]) for completion in got.values()}
        # The byte-level alphabet writes a space as another letter.
        assert {text.replace("\u0120", "") for text in texts} <= {'{"a":"x"}', '{"a":"yy"}'}, texts
        assert {completion.stop_reason for completion in got.values()} == {StopReason.END}
        # Its logprobs are those of the distribution sampled from: most places leave no choice.
        assert sum(completion.logprobs.count(0.0) for completion in got.values()) > 4 * 6

    @pytest.mark.parametrize(
        "schema", ['{"type": "nonsense"}', '{"type": "string", "pattern": "("}', '{"$ref": "#/nowhere"}']
    )
    async def test_a_schema_that_makes_no_sense_is_refused(self, running: Running, schema: str) -> None:
        if "json_schema" not in running.info.sampling_fields:
            pytest.skip("refused by name")
        await running.base()
        with pytest.raises(ServiceError) as caught:
            await collect(running.engine, job("schema", json_schema=schema, end=(END,)))
        assert caught.value.reason is Reason.INVALID_FIELD, caught.value
        assert [field for field, _ in caught.value.violations] == ["params.json_schema"]
        assert len((await self._one(running, "after")).token_ids) == 24

    async def _one(self, running: Running, name: str, **params: object) -> Completion:
        options: dict[str, object] = {"seed": 1, "max_tokens": 24} | params
        completion = (await collect(running.engine, job(name, **options)))[0]  # type: ignore[arg-type]
        assert all(map(math.isfinite, completion.logprobs))
        return completion
