"""Micro-batches side by side: each lane has its share of the threads, and what it computes in them."""

import threading

import pytest
import torch
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.engine.lanes import Lanes
from opentinker_trainer.engine.scoring import Scorer
from opentinker_trainer.settings import TrainerSettings


def test_works_run_at_once_and_come_back_in_order() -> None:
    lanes = Lanes(2, 4)
    together = threading.Barrier(2)

    def work(number: int) -> tuple[int, int]:
        # One after the other would never come past this.
        together.wait(30)
        return number, torch.get_num_threads()

    assert lanes.run([lambda: work(0), lambda: work(1)]) == [(0, 2), (1, 2)]
    assert lanes.run([torch.get_num_threads]) == [4]
    assert lanes.run([]) == []
    torch.set_num_threads(1)


def test_the_first_error_is_raised_once_all_have_ended() -> None:
    lanes = Lanes(2, 2)
    ended = []

    def failing(text: str) -> None:
        try:
            raise ValueError(text)
        finally:
            ended.append(text)

    with pytest.raises(ValueError, match="first"):
        lanes.run([lambda: failing("first"), lambda: failing("second"), lambda: failing("third")])
    assert sorted(ended) == ["first", "second", "third"]
    torch.set_num_threads(1)


def test_a_pass_uses_its_lanes_and_one_that_fails_leaves_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(token_budget=32, lanes=2)
    engine.create_policy("p", SPEC, seed=1)
    threads: list[str] = []
    score = Scorer.score

    def noted(*arguments: object, **options: object) -> object:
        threads.append(threading.current_thread().name)
        if len(threads) == 4:
            raise RuntimeError("the fourth")
        return score(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Scorer, "score", noted)
    component = Component("main", Ppo(), 40.0)
    with pytest.raises(RuntimeError, match="the fourth"):
        engine.forward_backward("p", ragged_batch(), [component])
    assert len({name for name in threads if name.startswith("lane")}) == 2
    assert not engine._policies["p"].gradients
    engine.forward_backward("p", ragged_batch(), [component])
    assert engine._policies["p"].gradients


def test_settings_of_lanes() -> None:
    assert TrainerSettings(base_model="m", threads=1).engine_lanes() == 1
    assert TrainerSettings(base_model="m", threads=8).engine_lanes() == 2
    assert TrainerSettings(base_model="m", threads=8, lanes=4).engine_lanes() == 4
    assert TrainerSettings(base_model="m", threads=8, device="cuda").engine_lanes() == 1
    with pytest.raises(ValueError, match="lanes is 3, and an engine process has 2 threads"):
        TrainerSettings(base_model="m", threads=2, lanes=3)
    with pytest.raises(ValueError, match="lanes is 2, and on cuda"):
        TrainerSettings(base_model="m", threads=2, lanes=2, device="cuda")
