"""A case for every loss, and a batch that every loss can be computed of.

In the batch whatever the loss mask leaves out is NaN or infinite, so that a leak shows in every test.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from services.trainer.tests.builders import VOCABULARY, sample

from opentinker_trainer.domain.losses import (
    Cispo,
    Component,
    Correction,
    CorrectionKind,
    CrossEntropy,
    Distillation,
    DppoTv,
    Dro,
    Entropy,
    Gmpo,
    Gspo,
    ImportanceSampling,
    Kl,
    KlEstimator,
    Ppo,
    Sapo,
    Value,
)
from opentinker_trainer.domain.registered import Art, PrimeRl, ReinforceIs, Vespo
from opentinker_trainer.domain.samples import ARRAYS, Sample
from opentinker_trainer.domain.support import Support

DENOMINATOR = 40.0


def _cases() -> Iterable[Component]:
    def case(name: str, loss: object, correction: Correction | None = None) -> Component:
        return Component(name, loss, DENOMINATOR, correction=correction)  # type: ignore[arg-type]

    yield case("importance_sampling", ImportanceSampling())
    yield case("ppo", Ppo(0.2, 0.28, 1.5))
    yield case("gspo", Gspo(0.05, 0.05))
    yield case("cispo", Cispo(0.8, 1.28))
    yield case("sapo", Sapo())
    yield case("gmpo", Gmpo(0.2, 0.2))
    # The tiny model's probabilities are about 1 / 256.
    yield case("dppo_tv", DppoTv(1e-3, 1e-3, 1.3))
    yield case("dro", Dro(0.5))
    yield case("cross_entropy", CrossEntropy())
    for estimator in KlEstimator:
        yield case(f"kl_{estimator.value}", Kl(estimator))
    yield case("kl_weighted", Kl(importance_weighted=True))
    yield case("distillation", Distillation())
    yield case("entropy", Entropy())
    yield case("value", Value())
    yield case("value_clipped", Value(0.1))
    yield case("prime_rl", PrimeRl(mask_low=1e-3, mask_high=1e-3, kl_tau=0.1))
    yield case("reinforce_is", ReinforceIs(0.8, 1.28))
    yield case("art", Art(0.2, 0.28))
    yield case("vespo", Vespo())
    for kind, low, high, token_high in [
        (CorrectionKind.NONE, None, None, None),
        (CorrectionKind.TOKEN_TRUNCATE, None, 1.1, None),
        (CorrectionKind.TOKEN_MASK, 0.8, 1.2, None),
        (CorrectionKind.SEQUENCE_TRUNCATE, None, 1.1, None),
        (CorrectionKind.SEQUENCE_MASK, 0.5, 1.5, None),
        (CorrectionKind.GEOMETRIC_MASK, 0.9, 1.1, 1.2),
    ]:
        yield case(f"ppo_{kind.value}", Ppo(), Correction(kind, low, high, token_high))


CASES = {component.name: component for component in _cases()}


def full_batch() -> list[Sample]:
    """Eight rows with every array: four share a prompt, lengths are ragged, temperatures differ, one row has
    one loss token, one has two turns with a gap between them; every other row was chosen among few ids.
    """
    rows = [
        sample(12, 2 + 3 * i, i, prompt_seed=7, advantage=0.5 - 0.4 * i, temperature=0.7) for i in range(4)
    ]
    rows += [sample(3 + 5 * i, 1 + 4 * i, 50 + i, advantage=(-1.0) ** i) for i in range(4)]
    gap = rows[6].loss_mask.copy()
    gap[15:18] = False
    rows[6] = replace(rows[6], loss_mask=gap)
    rows = [_filled(row, 100 + number) for number, row in enumerate(rows)]
    return [
        replace(row, support=narrow(row, 200 + number)) if number % 2 else row
        for number, row in enumerate(rows)
    ]


def narrow(row: Sample, seed: int) -> Support:
    """Between one and a hundred ids a token, the token among them; one token has the whole vocabulary, and
    where nobody trains there is junk.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 100, row.length).astype(np.int32)
    sizes[int(np.flatnonzero(row.loss_mask)[-1])] = 0
    sets = []
    for token, trained, size in zip(row.token_ids, row.loss_mask, sizes, strict=True):
        others = random.permutation(VOCABULARY)
        chosen = np.concatenate([[token], others[others != token]])[:size] if trained else np.full(size, -7)
        sets.append(chosen)
    return Support(sizes, np.concatenate(sets).astype(np.int32))


def _filled(row: Sample, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    near = {
        name: -5.5 + 0.3 * random.standard_normal(row.length)
        for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs")
    }
    values = {
        **near,
        "proximal_logprobs": near["behavior_logprobs"] + 0.2 * random.standard_normal(row.length),
        "advantages": row.advantages,
        "weights": random.choice([1.0, 0.5, -0.25], row.length),
        "returns": random.standard_normal(row.length),
        "old_values": 0.3 * random.standard_normal(row.length),
    }
    junk = np.where(np.arange(row.length) % 2, np.nan, -np.inf)
    arrays = {name: np.where(row.loss_mask, values[name], junk).astype(np.float32) for name in ARRAYS}
    return replace(row, **arrays)  # type: ignore[arg-type]


def padded(row: Sample, count: int) -> Sample:
    """The row with `count` more columns that nobody trains on."""

    def longer(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.concatenate([array, np.zeros(count, array.dtype)])

    return replace(
        row,
        token_ids=longer(row.token_ids),
        loss_mask=longer(row.loss_mask),
        **{name: longer(getattr(row, name)) for name in ARRAYS},
        support=row.support and replace(row.support, sizes=longer(row.support.sizes)),
    )
