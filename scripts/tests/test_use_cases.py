"""What the evidence of the use cases is made of: demonstrations of a known worth, gains and intervals."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from opentinker.environments.tools import in_words
from scripts import use_cases
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, demonstration, demonstrations, gained, learned, measure

CASES = ("customer_service", "gomoku", "household", "maths", "maths_with_python", "phone")


def case_of(name: str) -> UseCase:
    case: UseCase = import_module(f"scripts.evidence_cases.{name}").CASE
    return case


def worth(case: UseCase, script: Any, seeds: range, monkeypatch: pytest.MonkeyPatch) -> float:
    """The mean reward of a script's demonstrations."""
    rewards: list[float] = []
    step: Any = case.env.step

    def watched(self: Any, action: Any) -> Any:
        result = step(self, action)
        if result.done:
            reward = result.rewards["x"] if len(case.env.agents) > 1 else result.reward
            rewards.append(reward.value or 0.0)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(case.env, "step", watched)
        for seed in seeds:
            demonstration(case, script(), seed)
    assert len(rewards) == len(seeds)
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("name", CASES)
def test_good_demonstrations_succeed_and_poor_ones_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    good, poor = case.scripts
    assert case.name == name
    assert worth(case, good, range(20), monkeypatch) > 0.85
    assert worth(case, poor, range(20), monkeypatch) < 0.15


@pytest.mark.parametrize("name", CASES)
def test_demonstrations_are_chats_and_the_seed_decides(name: str) -> None:
    case = replace(case_of(name), demonstrations=24)
    rows = demonstrations(case, 0)
    assert len(rows) == 24
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert "system" not in roles[1:]
        roles = roles[roles[0] == "system" :]
        assert roles[1::2] == ["assistant"] * (len(roles) // 2)
        assert set(roles[::2]) <= {"user", "tool"}
    assert rows == demonstrations(case, 0) != demonstrations(case, 1)


def test_a_demonstration_shows_tools_as_the_loop_does() -> None:
    case = case_of("maths_with_python")
    row = demonstration(case, case.scripts[0](), 0)
    system, question, call, seen, answer = row["messages"]
    assert system == {"role": "system", "content": in_words([each.schema for each in case.env.tools])}
    assert (question["role"], seen["role"]) == ("user", "tool")
    assert call["content"].startswith("<tool_call>")
    assert answer["content"] == f"Answer: {seen['content'].strip()}"


def test_a_demonstration_adds_tools_to_the_system_message_of_the_environment() -> None:
    case = case_of("customer_service")
    system, *rest = demonstration(case, case.scripts[0](), 0)["messages"]
    assert system["content"].startswith("You serve the customers of a shop.")
    assert system["content"].endswith(in_words([each.schema for each in case.env.tools]))
    assert rest[0]["role"] == "user"


def test_a_task_is_compared_with_itself() -> None:
    gain, low, high = gained({"a": 0.0, "b": 0.5, "c": 1.0}, {"a": 0.5, "b": 1.0, "d": 0.0})
    assert (gain, low, high) == (0.5, 0.5, 0.5)
    gain, low, high = gained({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.0})
    assert gain == 0.5
    assert (low, high) == pytest.approx((0.5 - 0.98, 0.5 + 0.98))


@pytest.mark.parametrize(
    ("gain", "low", "within"), [(0.3, 0.01, True), (0.29, 0.2, False), (0.4, -0.01, False)]
)
def test_bounds(gain: float, low: float, within: bool) -> None:
    fine = {"gain": 0.5, "gain_95": [0.4, 0.6]}
    seeds = {"0": fine, "1": {"gain": gain, "gain_95": [low, 1.0]}}
    found = learned({"untrained": {"reward": 0.0}, "seeds": seeds})
    assert found["seeds"] == seeds
    assert found["within"] is within


def test_a_seed_that_was_stopped_goes_on_after_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def warm_up(case: UseCase, seed: int, folder: Path, state_dir: Path) -> dict[str, Any]:
        done.append(f"warm {seed}")
        state_dir.mkdir(parents=True)
        return {"checkpoint": f"of {seed}"}

    def reinforce(
        case: UseCase, seed: int, folder: Path, state_dir: Path, warm: dict[str, Any]
    ) -> dict[str, Any]:
        done.append(f"learn {seed}")
        assert state_dir.exists(), "the warm-up's checkpoint is in there"
        if len(done) == 3:
            raise KeyboardInterrupt
        return {"from": warm["checkpoint"]}

    def untrained(case: UseCase, state_dir: Path) -> dict[str, Any]:
        done.append("untrained")
        return {"reward": 0.0}

    monkeypatch.setattr(use_cases, "untrained", untrained)
    monkeypatch.setattr(use_cases, "warm_up", warm_up)
    monkeypatch.setattr(use_cases, "reinforce", reinforce)
    case = case_of("maths")
    with pytest.raises(KeyboardInterrupt):
        measure(case, Progress(tmp_path, "abc"))
    found = measure(case, Progress(tmp_path, "abc"))
    assert done == ["untrained", "warm 0", "learn 0", "learn 0", "warm 1", "learn 1", "warm 2", "learn 2"]
    seeds = {seed: {"from": f"of {seed}"} for seed in ("0", "1", "2")}
    assert found == {"untrained": {"reward": 0.0}, "seeds": seeds}
    assert not list((tmp_path / "abc").glob("stack-*"))


def test_rewards_by_task() -> None:
    assert use_cases.rewards_by_task(_result({1: [0.0, 1.0], 2: [1.0], 3: []})) == {
        '{"n": 1}': 0.5,
        '{"n": 2}': 1.0,
    }


def _result(rewards: dict[int, list[float]]) -> ot.EvaluationResult:
    from types import SimpleNamespace

    groups: Any = tuple(SimpleNamespace(task={"n": n}, rewards=each) for n, each in rewards.items())
    return ot.EvaluationResult(0.5, 0.4, 0.6, 2, 1, 0, 0, 1.0, "x", groups)
