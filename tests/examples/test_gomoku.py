"""Gomoku: who has won, what is no move, what the scripts are worth, what is held out."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import opentinker as ot
from examples.gomoku import HELD_OUT, MISTAKES, Board, Gomoku, cell_of, expert, held_out, name, script
from opentinker.environments import Observation

Player = Callable[[Observation, random.Random], str]
SMALL = {"size": 5, "line": 4}


def board(*rows: str, line: int = 4) -> Board:
    stones = {(c, r): mark for r, row in enumerate(rows) for c, mark in enumerate(row) if mark != "."}
    return Board(len(rows), line, stones)


def cells(*names: str) -> list[tuple[int, int]]:
    return [cell_of(each) for each in names]


@pytest.mark.parametrize(
    ("rows", "wins"),
    [
        ((".xxx.", ".....", ".....", ".....", "....."), ["a1", "e1"]),
        (("x....", "x....", ".....", "x....", "....."), ["a3"]),
        (("x....", ".x...", "..x..", ".....", "....."), ["d4"]),
        (("....x", "...x.", "..x..", ".....", "....."), ["b4"]),
        (("xxx..", ".....", ".....", ".....", "....."), ["d1"]),
        (("...xx", "x....", ".....", ".....", "....."), []),
        (("oxxxo", ".....", ".....", ".....", "....."), []),
    ],
)
def test_lines(rows: tuple[str, ...], wins: list[str]) -> None:
    assert board(*rows).winning("x") == cells(*wins)
    assert board(*rows).winning("o") == []


def test_two_threats_at_once() -> None:
    open_two = board(".....", ".....", ".xx..", ".....", ".....")
    assert open_two.double("x") == cells("d3")
    assert open_two.double("o") == []
    # For every stone: exactly those after which two places win, by the slow definition.
    for seed in range(40):
        dice = random.Random(seed)
        drawn = Board(5, 4, {cell: dice.choice("xo") for cell in dice.sample(Board(5, 4).free(), 9)})
        slow = [cell for cell in drawn.free() if len(drawn.with_stone(cell, "x").winning("x")) > 1]
        # A stone that wins already needs no second threat.
        assert [cell for cell in drawn.double("x") if not drawn.wins("x", cell)] == [
            cell for cell in slow if not drawn.wins("x", cell)
        ]


def begin(options: Mapping[str, Any] = SMALL, **task: str) -> tuple[Gomoku, str, Observation]:
    game = Gomoku(**options)
    ((player, seen),) = game.reset(seed=0, task=task or {"x": "a1", "o": "e5", "begins": "x"}).items()
    return game, player, seen


def test_turns_and_legal_actions() -> None:
    game, player, seen = begin()
    assert player == "x"
    assert "You are x" in seen.text
    assert len(seen.legal_actions) == 23
    assert {"a1", "e5"}.isdisjoint(seen.legal_actions)
    step = game.step({"x": ot.Action("I play b1.")})
    assert list(step.observations) == ["o"]
    assert step.observations["o"].text.startswith("x played b1.\nGomoku")
    assert "b1" not in step.observations["o"].legal_actions
    again = game.step({"o": ot.Action("D5")}).observations["x"].text
    assert "Gomoku" not in again
    assert "1 x x . . ." in again
    assert "5 . . . o o" in again


def test_winning_losing_and_drawing() -> None:
    game, _, _ = begin()
    for mine, theirs in (("b1", "e4"), ("c1", "e3")):
        assert not game.step({"x": ot.Action(mine)}).done
        assert not game.step({"o": ot.Action(theirs)}).done
    won = game.step({"x": ot.Action("d1")})
    assert won.terminated
    assert {each: reward.value for each, reward in won.rewards.items()} == {"x": 1.0, "o": 0.0}
    game, _, _ = begin({"size": 3, "line": 3, "draw": 0.5}, x="b2", o="a1", begins="x")
    for mine, theirs in (("c1", "a3"), ("a2", "c2"), ("b1", "b3")):
        game.step({"x": ot.Action(mine)})
        game.step({"o": ot.Action(theirs)})
    drawn = game.step({"x": ot.Action("c3")})
    assert {each: reward.value for each, reward in drawn.rewards.items()} == {"x": 0.5, "o": 0.5}


def test_the_whole_game_is_worth_who_won() -> None:
    game, _, _ = begin()
    for mine, theirs in (("b1", "e4"), ("c1", "e3")):
        game.step({"x": ot.Action(mine)})
        game.step({"o": ot.Action(theirs)})
    # A limit of the loop may stop it here: not won is 0, and never a game without a reward.
    assert game.finalize() == {"x": 0.0, "o": 0.0}
    game.step({"x": ot.Action("d1")})
    assert game.finalize() == {"x": 1.0, "o": 0.0}


@pytest.mark.parametrize("text", ["", "pass", "a1", "e5", "f1", "a6", "a0", "b1 or b2", "a11"])
def test_what_is_no_move_loses_in_the_end(text: str) -> None:
    game, _, _ = begin()
    for _ in range(MISTAKES):
        told = game.step({"x": ot.Action(text)})
        assert list(told.observations) == ["x"]
        assert told.observations["x"].text.startswith("That is no free place.")
    lost = game.step({"x": ot.Action(text)})
    assert {each: reward.value for each, reward in lost.rewards.items()} == {"x": 0.0, "o": 1.0}
    assert game.metrics() == {"moves": 0.0, "mistakes": MISTAKES + 1}


def last_lines(options: Mapping[str, Any], *moves: str) -> list[str]:
    """The last line that is seen after each move; x begins."""
    game, _, _ = begin({**SMALL, **options}, x="b3", o="a1", begins="x")
    lines = []
    for number, move in enumerate(moves):
        ((_, seen),) = game.step({"xo"[number % 2]: ot.Action(move)}).observations.items()
        lines.append(seen.text.splitlines()[-1])
    return lines


def test_threats_are_told_where_asked_for() -> None:
    moves = ("c3", "a2", "d3", "a3")
    assert last_lines({"threats": True}, *moves) == ["Defend: d3", "Attack: d3", "Block: a3 e3", "Win: e3"]
    assert all(line.startswith("5 ") for line in last_lines({}, *moves))


def won(x: Player, o: Player, games: int = 60) -> float:
    """The share of games that x wins, from held-out openings."""
    wins = 0.0
    tasks = Gomoku(**SMALL).tasks("test") or ()
    for number in range(games):
        game, dice = Gomoku(**SMALL, threats=True), random.Random(number)
        pending = game.reset(seed=number, task=dict(tasks[number]))
        while True:
            ((player, seen),) = pending.items()
            step = game.step({player: ot.Action((x if player == "x" else o)(seen, dice))})
            if step.done:
                break
            pending = step.observations
        wins += step.rewards["x"].value or 0.0
    return wins / games


def anywhere(seen: Observation, dice: random.Random) -> str:
    return dice.choice(seen.legal_actions)


def test_the_script_is_decent_and_beatable() -> None:
    assert won(anywhere, script) < 0.1
    assert won(expert, script) > 0.85
    assert 0.3 < won(script, script) < 0.7


def test_held_out_openings_are_never_drawn() -> None:
    game = Gomoku()
    tasks = game.tasks("test") or ()
    assert len({str(task) for task in tasks}) == len(tasks) == HELD_OUT
    assert {task["begins"] for task in tasks} == {"x", "o"}
    assert all(map(held_out, tasks))
    assert not any(held_out(game.opening(seed)) for seed in range(500))
    assert game.opening(1) == game.opening(1) != game.opening(2)


@pytest.mark.parametrize("options", [{"size": 4}, {"size": 16}, {"line": 2}, {"draw": 1.0}, {"draw": -0.5}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Gomoku(**options)


def test_names_of_cells() -> None:
    assert [cell_of(name(cell)) for cell in Board(15, 5).free()] == Board(15, 5).free()
