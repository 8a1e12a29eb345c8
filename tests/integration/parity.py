"""A trainer and an inference server side by side, random adapters, and how far their logprobs are apart.

Everything goes over the wire: the adapter as a published version, the tokens with their logprobs and the ids
that they were chosen among as the sampler gave them, the trainer's logprobs as a Forward gives them.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from services.inference.tests.serving import Client as SamplingClient
from services.inference.tests.serving import serving
from services.trainer.tests.server.harness import Client as TrainingClient

from opentinker_kit.events import NullEventBus
from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.testing import wait_until
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import prompt_pb2, train_sample_pb2
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.tensors import pack_ids, unpack_floats, unpack_ids

TEMPERATURES = (0.3, 0.7, 1.0)
CUTS: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.9, "top_k": 200},
    {"top_k": 20},
    {"top_p": 0.6, "top_k": 100},
    {"min_p": 0.05, "top_k": 200},
)
"""What is cut off, in turn; None of them together with any temperature is left out."""
ADAPTERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (4, ("q_proj", "v_proj")),
    (8, ()),
    (16, ("down_proj", "gate_proj", "up_proj")),
    (2, ("k_proj", "o_proj")),
    (8, ("o_proj", "down_proj")),
    (16, ()),
    (4, ()),
)
"""(rank, target modules; none: all linear layers)."""
PROMPTS = 25
"""Of each adapter: 200 in all."""
NEW_TOKENS = 10


@dataclass
class Pair:
    """Both servers, over one object store."""

    sampler: SamplingClient
    trainer: TrainingClient
    model: str
    vocabulary: int
    learning_rate: float
    """Of the steps that make the adapters."""


@dataclass
class Gaps:
    """Largest differences of logprobs, by what was sampled; `forgotten` is what they would be without the
    sets, `of_the_base` without the adapter.
    """

    by_setting: dict[tuple[float, int], float] = field(default_factory=dict)
    forgotten: float = 0.0
    of_the_base: dict[int, float] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0


@contextlib.asynccontextmanager
async def side_by_side(
    model: str,
    directory: Path,
    engine: str,
    *,
    vocabulary: int,
    learning_rate: float = 1e-2,
    **settings: object,
) -> AsyncIterator[Pair]:
    """Start both in float32."""
    objects = MemoryObjectStore()
    trainer = TrainerServer(
        TrainerSettings(
            base_model=model,
            threads=1,
            state_dir=directory / "trainer",
            allow_any_model_dir=True,
            model_cache_dir=None,
            recovery_every_steps=1000,
        ),
        objects=objects,
        bus=NullEventBus(),
    )
    await trainer.start()
    try:
        async with (
            serving(
                Path(model),
                directory / "inference",
                objects=objects,
                base_model=model,
                engine=engine,
                dtype="float32",
                context_tokens=256,
                **settings,
            ) as sampler,
            open_channel(trainer.server.address) as channel,
        ):
            await wait_until(lambda: trainer.admission.limits is not None, 120)
            yield Pair(sampler, TrainingClient(channel), model, vocabulary, learning_rate)
    finally:
        trainer.server.request_drain()
        await trainer.run()


async def measure(pair: Pair, adapters: Sequence[int], prompts: int) -> Gaps:
    """Sample `prompts` random prompts under each of the adapters, and score what came."""
    gaps = Gaps()
    for number in adapters:
        random = np.random.default_rng(number)
        await _adapter(pair, number, random)
        settings = [
            (TEMPERATURES[(ordinal // len(CUTS)) % len(TEMPERATURES)], ordinal % len(CUTS))
            for ordinal in range(prompts)
        ]
        asked = [
            random.integers(0, pair.vocabulary, size).tolist() for size in random.integers(2, 48, prompts)
        ]
        sampled = await asyncio.gather(
            *(
                _sampled(pair, prompt, temperature, CUTS[cut])
                for prompt, (temperature, cut) in zip(asked, settings, strict=True)
            )
        )
        rows = [row for row, _ in sampled]
        behavior = [logprobs for _, logprobs in sampled]
        own = await _scored(pair, rows)
        of_the_base = await _scored(pair, rows, use_base_model=True)
        forgetful = await _scored(pair, [_without_sets(row) for row in rows])
        for setting, theirs, mine, base, full in zip(
            settings, behavior, own, of_the_base, forgetful, strict=True
        ):
            gap = float(np.abs(theirs - mine).max())
            gaps.by_setting[setting] = max(gaps.by_setting.get(setting, 0.0), gap)
            if setting[1]:
                gaps.forgotten = max(gaps.forgotten, float(np.abs(theirs - full).max()))
            else:
                known = gaps.of_the_base.get(number, 0.0)
                gaps.of_the_base[number] = max(known, float(np.abs(theirs - base).max()))
            gaps.rows += 1
            gaps.tokens += len(theirs)
    return gaps


async def _adapter(pair: Pair, number: int, random: np.random.Generator) -> None:
    """A policy with an adapter that two large steps on random tokens made, published as version 1."""
    rank, targets = ADAPTERS[number]
    tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=rank, target_modules=targets))
    await pair.trainer.create(f"create {number}", model=pair.model, tuning=tuning)
    for _ in range(2):
        rows = [_row(random.integers(0, pair.vocabulary, 24).tolist(), prompt_tokens=4) for _ in range(2)]
        trained = await pair.trainer.forward_backward(rows)
        step = pair.trainer.step_request([trained.seq])
        step.adamw.learning_rate = pair.learning_rate
        await pair.trainer.done((await pair.trainer.call("OptimStep", step)).operation)
    await pair.trainer.done(await pair.trainer.publish())


async def _sampled(
    pair: Pair, prompt: list[int], temperature: float, cut: dict[str, float]
) -> tuple[train_sample_pb2.TrainSample, np.ndarray]:
    """One completion as a row, and the sampler's logprobs of its tokens."""
    request = pair.sampler.request(
        uuid.uuid4().hex,
        tuple(prompt),
        version=1,
        policy=pair.trainer.policy,
        max_tokens=NEW_TOKENS,
        temperature=temperature,
        ignore_eos=True,
        return_support=bool(cut),
        seed=int(np.random.default_rng(prompt).integers(1 << 30)),
        **cut,
    )
    completion: sampling_pb2.Completion = (await pair.sampler.send(request)).completions[0]
    ids = unpack_ids(completion.token_ids)
    row = _row([*prompt, *ids], prompt_tokens=len(prompt), temperature=temperature)
    if cut:
        sizes = unpack_ids(completion.support_sizes)
        assert len(sizes) == len(ids)
        assert min(sizes) >= 1
        row.support_sizes = pack_ids([0] * len(prompt) + sizes)
        row.support_token_ids = completion.support_token_ids
    return row, unpack_floats(completion.logprobs).astype(np.float64)


def _row(ids: list[int], *, prompt_tokens: int, temperature: float = 1.0) -> train_sample_pb2.TrainSample:
    chunk = prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(ids)))
    return train_sample_pb2.TrainSample(
        chunks=[chunk],
        loss_mask=bytes([0] * prompt_tokens + [1] * (len(ids) - prompt_tokens)),
        sampling_temperature=temperature,
    )


def _without_sets(row: train_sample_pb2.TrainSample) -> train_sample_pb2.TrainSample:
    copy = train_sample_pb2.TrainSample()
    copy.CopyFrom(row)
    copy.ClearField("support_sizes")
    copy.ClearField("support_token_ids")
    return copy


async def _scored(pair: Pair, rows: list[train_sample_pb2.TrainSample], **options: bool) -> list[np.ndarray]:
    """The trainer's logprobs of the trained tokens of each row."""
    done = await pair.trainer.done(await pair.trainer.forward(rows, **options))
    return [
        unpack_floats(output.logprobs)[np.frombuffer(row.loss_mask, np.uint8) == 1].astype(np.float64)
        for row, output in zip(rows, done.forward.outputs, strict=True)
    ]
