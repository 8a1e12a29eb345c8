"""Learning rates as functions of the step."""

import pickle

import numpy as np
import pytest

import opentinker as ot
from opentinker import errors
from opentinker.training.schedules import Constant, Cosine, Linear, WarmupStableDecay

ALL = [
    Constant(3e-4),
    Constant(3e-4, warmup=5),
    Linear(3e-4, steps=20, warmup=5),
    Linear(3e-4, steps=20, final=1e-5),
    Cosine(3e-4, steps=20, warmup=5, final=1e-5),
    WarmupStableDecay(3e-4, steps=20, warmup=5, decay=6),
]


def test_values() -> None:
    linear = Linear(1.0, steps=10, warmup=4)
    np.testing.assert_allclose([linear(step) for step in range(1, 5)], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose([linear(5), linear(10)], [6 / 7, 1 / 7])
    cosine = Cosine(1.0, steps=9, final=0.2)
    np.testing.assert_allclose(
        [cosine(step) for step in range(1, 10)],
        [0.2 + 0.4 * (1 + np.cos(np.pi * (step - 1) / 9)) for step in range(1, 10)],
    )
    held = WarmupStableDecay(1.0, steps=10, warmup=2, decay=3)
    np.testing.assert_allclose([held(s) for s in range(1, 11)], [0.5, *[1] * 6, 0.75, 0.5, 0.25])
    assert [Constant(2.0, warmup=2)(step) for step in (1, 2, 3, 99)] == [1.0, 2.0, 2.0, 2.0]
    assert WarmupStableDecay(1.0, steps=3)(3) == 1.0


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_no_state_no_wasted_step(schedule: Constant) -> None:
    rates = [schedule(step) for step in range(1, 21)]
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert [copy(step) for step in reversed(range(1, 21))] == rates[::-1]
    assert min(rates) > 0
    assert max(rates) == 3e-4
    peak = rates.index(3e-4)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert schedule(1000) <= rates[-1]
    assert repr(schedule).startswith(f"{type(schedule).__name__}(")
    with pytest.raises(errors.InvalidArgument, match="step"):
        schedule(0)


def test_options_are_checked() -> None:
    assert ot.schedules.Cosine is Cosine
    for call, name in (
        (lambda: Constant(-1.0), "rate"),
        (lambda: Constant(1.0, warmup=-1), "warmup"),
        (lambda: Linear(float("nan"), steps=3), "peak"),
        (lambda: Linear(1.0, steps=0), "steps"),
        (lambda: Cosine(1.0, steps=3, warmup=4), "steps"),
        (lambda: Cosine(1.0, steps=3, final=-1.0), "final"),
        (lambda: WarmupStableDecay(1.0, steps=5, warmup=2, decay=4), "decay"),
    ):
        with pytest.raises(errors.InvalidArgument, match=name):
            call()
