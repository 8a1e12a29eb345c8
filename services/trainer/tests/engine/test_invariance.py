"""The invariance harness: whatever way a request is cut, laid out, ordered or divided, every loss gives the
same sums, the same gradient and the same metrics.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch
from services.trainer.tests.engine.cases import CASES, DENOMINATOR, full_batch, padded
from services.trainer.tests.engine.conftest import SPEC, MakeEngine
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from opentinker_trainer.domain.losses import (
    Component,
    CorrectionKind,
    CrossEntropy,
    Entropy,
    Kl,
    KlEstimator,
    OtherLoss,
    PolicyLoss,
    Ppo,
)
from opentinker_trainer.domain.registered import registered_kinds
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, LoraSpec, TuningSpec
from opentinker_trainer.engine.core import TorchEngine
from opentinker_trainer.engine.objective import BackwardOutput

Cut = dict[str, int | bool | str]
POLICY = "policies/p"
SMALL = LoraSpec(4, 8.0, ("down_proj", "q_proj"), value_head=True)
EXACT = 1e-9


@dataclass(frozen=True)
class Result:
    """What a request gave."""

    sums: dict[str, tuple[float, float]]
    gradient: dict[str, Tensor]
    metrics: dict[str, tuple[float, float]]

    def check(self, other: "Result", bound: float, *, metrics: bool = True) -> None:
        assert self.sums == {
            name: pytest.approx(value, abs=bound, rel=bound) for name, value in other.sums.items()
        }
        assert largest_difference(self.gradient, other.gradient) < bound
        if not metrics:
            return
        assert self.metrics.keys() == other.metrics.keys()
        for name, (total, weight) in self.metrics.items():
            expected, expected_weight = other.metrics[name]
            assert weight == expected_weight, name
            assert total == pytest.approx(expected, abs=bound * max(weight, 1.0), rel=bound), name


def shaken(engine: TorchEngine, name: str, spec: TuningSpec, seed: int) -> None:
    """A policy that differs from the base: what begins at zero is random."""
    policy = engine.create_policy(name, spec, seed=seed)
    generator = np.random.default_rng(5)
    for key, parameter in policy.parameters.items():
        if ".lora_B." in key or key.startswith("value_head"):
            parameter.data.copy_(
                parameter.new_tensor(0.05 * generator.standard_normal(tuple(parameter.shape)))
            )


class Engines:
    """Engines by their cut, each with the same policy."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self._make = make_engine
        self._engines: dict[tuple[tuple[str, int | bool | str], ...], TorchEngine] = {}

    def get(self, cut: Cut) -> TorchEngine:
        key = tuple(sorted(cut.items()))
        if key not in self._engines:
            engine = self._make(dtype="float64", **cut)
            shaken(engine, POLICY, SMALL, 3)
            self._engines[key] = engine
        engine = self._engines[key]
        engine._policies[POLICY].gradients = {}
        return engine

    def run(
        self,
        cut: Cut,
        component: Component,
        parts: Iterable[list[Sample]] = (),
        **options: bool,
    ) -> Result:
        """One request for each part (default: the batch as it is), their results together."""
        engine = self.get(cut)
        outputs = [
            engine.forward_backward(POLICY, part, [component], **options) for part in parts or [full_batch()]
        ]
        return together(engine, outputs, component)


def together(engine: TorchEngine, outputs: list[BackwardOutput], component: Component) -> Result:
    gradients = engine._policies[POLICY].gradients
    scale = 1.0 if component.denominator is not None else DENOMINATOR
    gradient = gradients["" if component.denominator is not None else component.name]
    return Result(
        added(output.loss_sums for output in outputs),
        {name: value.clone() / scale for name, value in gradient.items()},
        added(output.metrics for output in outputs),
    )


def added(parts: Iterable[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    result: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (total, weight) in part.items():
            done = result.get(name, (0.0, 0.0))
            result[name] = (done[0] + total, done[1] + weight)
    return result


def norm(self: Qwen3RMSNorm, hidden_states: Tensor) -> Tensor:
    """As the model's own, which computes in float32 whatever it is given."""
    mean = hidden_states.square().mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(mean + self.variance_epsilon)


@pytest.fixture(scope="module")
def engines(make_engine: MakeEngine) -> Iterator[Engines]:
    """In float64 from end to end; rotary angles are float32 and depend on nothing but the position."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3RMSNorm, "forward", norm)
        yield Engines(make_engine)


WHOLE: Cut = {"token_budget": 100_000, "share_prefix": False, "pack": False}
PACKED: Cut = {"token_budget": 100_000}
SLICED: Cut = {"max_rows": 2, "logit_rows": 5, "slice_tokens": 64}
LANES: Cut = {"max_rows": 3, "lanes": 2}
CUTS: list[Cut] = [
    {"max_rows": 1, "share_prefix": False, "pack": False},
    {"max_rows": 2, "pack": False},
    {"max_rows": 4, "share_prefix": False, "pack": False},
    SLICED,
    LANES,
]
MORE_CUTS: list[Cut] = [
    {"max_rows": 8, "pack": False},
    {"token_budget": 64, "share_prefix": False},
    {"token_budget": 64, "logit_rows": 1},
    {"max_shared_row_tokens": 24},
    {"max_shared_row_tokens": 24, "pack": False},
    PACKED,
]


def test_every_loss_estimator_and_correction_has_a_case() -> None:
    kinds = {type(component.loss) for component in CASES.values()}
    assert kinds == {*get_args(PolicyLoss), *get_args(OtherLoss), *registered_kinds().values()}
    losses = [component.loss for component in CASES.values()]
    assert {loss.estimator for loss in losses if isinstance(loss, Kl)} == set(KlEstimator)
    corrections = {each.correction.kind for each in CASES.values() if each.correction is not None}
    assert corrections == set(CorrectionKind)


@pytest.mark.parametrize("component", CASES.values(), ids=CASES)
def test_any_cut_gives_the_same_loss_gradient_and_metrics(engines: Engines, component: Component) -> None:
    """B01, B03, B05, B10, B13, B14, B16, B28: of every loss, with junk where the mask is 0."""
    whole = engines.run(WHOLE, component)
    assert largest(whole.gradient) > 1e-6
    assert all(np.isfinite(value).all() for value in (*whole.sums.values(), *whole.metrics.values()))
    for cut in CUTS:
        engines.run(cut, component).check(whole, EXACT)


@pytest.mark.parametrize("name", ["ppo", "gspo", "entropy", "value_clipped", "ppo_sequence_mask"])
def test_more_cuts(engines: Engines, name: str) -> None:
    """Of a loss of each kind: per token, per sequence, of the whole distribution, of the value head."""
    whole = engines.run(WHOLE, CASES[name])
    for cut in MORE_CUTS:
        engines.run(cut, CASES[name]).check(whole, EXACT)


SPECS: dict[str, TuningSpec] = {
    "full": FullSpec(value_head=True),
    "output_layer": LoraSpec(4, 8.0, ("lm_head", "q_proj"), value_head=True),
    "checkpointing": LoraSpec(4, 8.0, ("q_proj",), value_head=True, activation_checkpointing=True),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_any_cut_of_any_tuning(engines: Engines, spec: TuningSpec) -> None:
    """Where the output layer is trained its gradient comes from every chunk of logits."""
    components = [CASES[name] for name in ("ppo", "entropy", "value", "kl_k3")]
    results = []
    for cut in (WHOLE, CUTS[0], SLICED, LANES):
        engine = engines.get(cut)
        shaken(engine, "policies/tuned", spec, 3)
        output = engine.forward_backward("policies/tuned", full_batch(), components)
        gradient = gradient_of(engine, "policies/tuned")
        results.append(Result(output.loss_sums, dict(gradient), output.metrics))
        engine.drop_policy("policies/tuned")
    for result in results[1:]:
        result.check(results[0], EXACT)


def shuffled(rows: list[Sample]) -> list[list[Sample]]:
    return [[rows[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]]


def longer(rows: list[Sample]) -> list[list[Sample]]:
    return [[padded(row, 5) for row in rows]]


def chunked(rows: list[Sample]) -> list[list[Sample]]:
    return [rows[:1], rows[1:6], rows[6:]]


@pytest.mark.parametrize("component", CASES.values(), ids=CASES)
def test_order_padding_and_chunks_do_not_matter(engines: Engines, component: Component) -> None:
    """B06, B12, B94, and a denominator that comes with the step is the same as one that is known before."""
    expected = engines.run(PACKED, component)
    for way in (shuffled, longer):
        engines.run(PACKED, component, way(full_batch())).check(expected, EXACT)
    engines.run(PACKED, component, chunked(full_batch())).check(expected, EXACT)
    deferred = replace(component, denominator=None)
    engines.run(PACKED, deferred, chunked(full_batch())).check(expected, EXACT)


@pytest.mark.parametrize("component", CASES.values(), ids=CASES)
def test_another_policy_does_not_matter(engines: Engines, component: Component) -> None:
    """B07: bit for bit, slice by slice beside another policy of another shape and size."""
    alone = engines.run(SLICED, component)
    engine = engines.get(SLICED)
    shaken(engine, "policies/other", SPEC, 9)
    try:
        engine.begin_forward_backward(POLICY, full_batch(), [component])
        engine.begin_forward_backward("policies/other", ragged_batch()[:3], [CASES["ppo"]])
        outputs: dict[str, BackwardOutput] = {}
        while len(outputs) < 2:
            for name in (POLICY, "policies/other"):
                if name not in outputs and (output := engine.advance(name)) is not None:
                    assert isinstance(output, BackwardOutput)
                    outputs[name] = output
        beside = together(engine, [outputs[POLICY]], component)
    finally:
        engine.drop_policy("policies/other")
    assert (beside.sums, beside.metrics) == (alone.sums, alone.metrics)
    assert all(torch.equal(beside.gradient[name], value) for name, value in alone.gradient.items())


@pytest.mark.parametrize("component", CASES.values(), ids=CASES)
def test_rows_that_cannot_contribute_are_left_out(engines: Engines, component: Component) -> None:
    """Their loss of 0 still counts; where they can contribute they are computed."""
    zeros = [np.zeros(row.length, np.float32) for row in full_batch()]
    rows = [
        replace(row, weights=zero) if at % 4 == 1 else replace(row, advantages=zero) if at % 4 == 3 else row
        for at, (row, zero) in enumerate(zip(full_batch(), zeros, strict=True))
    ]
    full = engines.run(WHOLE, component, [rows])
    engine = engines.get(WHOLE)
    output = engine.forward_backward(POLICY, rows, [component], skip_inert=True)
    short = together(engine, [output], component)
    short.check(full, EXACT, metrics=False)
    skipped = [score.skipped for score in output.scores]
    assert skipped == [at % 4 == 1 or (at % 4 == 3 and component.silent_without_advantage) for at in range(8)]
    name = f"loss/{component.name}"
    assert short.metrics[name] == pytest.approx(full.metrics[name], abs=EXACT)


def test_in_float32_the_cuts_agree_to_a_millionth(make_engine: MakeEngine) -> None:
    """In the precision that policies are trained in."""
    results = []
    component = CASES["ppo"]
    for cut in (WHOLE, CUTS[0], PACKED, {"attention": "eager"}):
        engine = make_engine(**cut)
        shaken(engine, POLICY, SMALL, 3)
        output = engine.forward_backward(POLICY, full_batch(), [component])
        results.append(together(engine, [output], component))
    for result in results[1:]:
        result.check(results[0], 1e-6)


def test_chunks_end_in_the_same_step(engines: Engines) -> None:
    """B10, B12, B94: parameters and gradient norm after the step, for known and deferred denominators."""
    engine = engines.get(SLICED)
    samples = full_batch()
    component = CASES["ppo"]
    deferred = replace(component, denominator=None)
    step = AdamWStep(learning_rate=1e-2, clip_norm=1.0)
    results = []
    for parts, wanted in [
        ([samples], component),
        ([[row] for row in samples], component),
        (chunked(samples), deferred),
    ]:
        policy = engine.create_policy("policies/q", SPEC, seed=0)
        for part in parts:
            engine.forward_backward("policies/q", part, [wanted])
        denominators = {} if wanted.denominator else {wanted.name: DENOMINATOR}
        report = engine.optim_step("policies/q", step, denominators)
        assert report.step == 1
        results.append(({k: v.clone() for k, v in policy.parameters.items()}, report.grad_norm))
    engine.drop_policy("policies/q")
    for parameters, norm in results[1:]:
        assert largest_difference(parameters, results[0][0]) < 1e-5
        assert norm == pytest.approx(results[0][1], rel=1e-6)


def test_several_components_add_up(engines: Engines) -> None:
    """Known and deferred denominators in one request, with coefficients, on some rows only; a policy loss
    beside supervision, a divergence, entropy, distillation and a value.
    """
    engine = engines.get(SLICED)
    samples = full_batch()
    names = {
        "ppo_token_truncate": 2.0,
        "kl_k3": 0.1,
        "entropy": -0.5,
        "value_clipped": 0.5,
        "distillation": 1.0,
    }
    parts = [
        replace(CASES[name], coefficient=factor, denominator=7.0 + at)
        for at, (name, factor) in enumerate(names.items())
    ]
    parts.append(Component("behave", CrossEntropy(), denominator=None, coefficient=0.5))
    marked = [replace(s, components=frozenset(names) if i % 2 else None) for i, s in enumerate(samples)]
    engine.forward_backward(POLICY, marked, parts)
    gathered = engine._policies[POLICY].gradients
    known, behave = dict(gathered[""]), dict(gathered["behave"])

    engine = engines.get(SLICED)
    for part in parts[:-1]:
        engine.forward_backward(POLICY, samples, [part])
    assert largest_difference(known, gradient_of(engine, POLICY)) < EXACT
    engine = engines.get(SLICED)
    engine.forward_backward(POLICY, samples[::2], [Component("behave", CrossEntropy(), 1.0, coefficient=0.5)])
    assert largest_difference(behave, gradient_of(engine, POLICY)) < EXACT


def test_an_update_of_two_tenants_is_that_of_each_alone(engines: Engines) -> None:
    """B07: a tenant with one row beside one with seven."""
    engine = engines.get(SLICED)
    rows = full_batch()
    step = AdamWStep(learning_rate=1e-2, clip_norm=1.0)

    def train(*tenants: tuple[str, list[Sample]]) -> dict[str, dict[str, Tensor]]:
        for name, _ in tenants:
            engine.create_policy(name, SPEC, seed=1)
        for name, own in tenants:
            engine.forward_backward(
                name, own, [Component("main", Ppo(), float(sum(r.loss_tokens for r in own)))]
            )
        for name, _ in tenants:
            engine.optim_step(name, step)
        found = {
            name: {key: value.clone() for key, value in engine._policies[name].parameters.items()}
            for name, _ in tenants
        }
        for name, _ in tenants:
            engine.drop_policy(name)
        return found

    small, large = ("policies/a", rows[:1]), ("policies/b", rows[1:])
    both = train(small, large)
    for tenant in (small, large):
        (alone,) = train(tenant).values()
        assert all(torch.equal(alone[key], value) for key, value in both[tenant[0]].items())


def test_entropy_moves_nothing_unless_it_is_asked_for(engines: Engines) -> None:
    """Its metric is there in any case, of the same value."""
    plain = engines.run(WHOLE, CASES["ppo"])
    engine = engines.get(WHOLE)
    bonus = Component("entropy", Entropy(), DENOMINATOR, coefficient=0.0)
    output = engine.forward_backward(POLICY, full_batch(), [CASES["ppo"], bonus])
    assert output.metrics["actor/entropy"] == pytest.approx(plain.metrics["actor/entropy"])
    assert output.loss_sums["entropy"][0] < 0
    assert largest_difference(gradient_of(engine, POLICY), plain.gradient) < 1e-12
