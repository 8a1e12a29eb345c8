"""The household game: what commands do, when a chore is done, which houses are held out."""

import random
from typing import Any

import pytest

import opentinker as ot
from examples.household import (
    CHORES,
    HELD_OUT,
    Chore,
    House,
    Household,
    Resident,
    build,
    held_out,
    wanderer,
)


def home(chore: Chore, **where: str) -> Household:
    """A game in a house of our own."""
    rooms = {"kitchen": ["fridge", "microwave", "sink", "table"], "bedroom": ["bed", "drawer"]}
    things = {"apple": "fridge", "cup": "table", "book": "bed", **where}
    game = Household()
    game.reset(seed=0, task={})
    game.house = House(rooms, things, "table", chore)
    return game


def play(game: Household, *commands: str) -> ot.StepResult:
    """The last step of these commands, each of which is told to the agent before."""
    for command in commands:
        assert command in game.commands(), f"{command!r} is none of {game.commands()}"
        step = game.step(ot.Action(command))
    return step


def shown(step: ot.StepResult) -> str:
    assert step.observation is not None
    return step.observation.text


def test_what_is_closed_must_be_opened() -> None:
    game = home(Chore("put", "apple", "table"))
    assert shown(play(game, "go to fridge")) == "The fridge is closed."
    assert "take apple" not in game.commands()
    assert shown(play(game, "open fridge")) == "In the fridge: an apple."
    assert shown(play(game, "take apple")) == "You hold the apple."
    done = play(game, "go to table", "put apple")
    assert (done.reward.value, done.terminated) == (1.0, True)


def test_a_hand_holds_one_thing_and_puts_it_anywhere() -> None:
    game = home(Chore("put", "apple", "table"))
    play(game, "go to table", "take cup", "go to bed")
    assert [each for each in game.commands() if not each.startswith("go ")] == ["put cup"]
    assert not play(game, "put cup").done
    assert shown(play(game, "go to table", "go to bed")) == "On the bed: a cup, a book."


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("heat", ("go to microwave", "open microwave", "heat apple")),
        ("cool", ("cool apple",)),
        ("clean", ("go to sink", "clean apple")),
    ],
)
def test_a_change_is_needed(kind: str, change: tuple[str, ...]) -> None:
    fetch = ("go to fridge", "open fridge", "take apple")
    game = home(Chore(kind, "apple", "table"))
    assert not play(game, *fetch, "go to table", "put apple").done
    game = home(Chore(kind, "apple", "table"))
    done = play(game, *fetch, *change, "go to table", "put apple")
    assert (done.reward.value, done.terminated) == (1.0, True)


def test_what_is_cooled_is_no_longer_hot() -> None:
    game = home(Chore("heat", "apple", "table"))
    play(game, "go to fridge", "open fridge", "take apple", "go to microwave", "open microwave", "heat apple")
    assert not play(game, "go to fridge", "cool apple", "go to table", "put apple").done


def test_only_the_right_thing_under_the_lamp() -> None:
    game = home(Chore("look", "book", "table"))
    assert not play(game, "go to table", "take cup", "use lamp").done
    done = play(game, "put cup", "go to bed", "take book", "go to table", "use lamp")
    assert done.reward.value == 1.0


def test_two_of_a_kind() -> None:
    game = home(Chore("two", "pen", "bed"), **{"pen 1": "table", "pen 2": "sink"})
    assert not play(game, "go to table", "take pen 1", "go to bed", "put pen 1").done
    done = play(game, "go to sink", "take pen 2", "go to bed", "put pen 2")
    assert done.reward.value == 1.0


@pytest.mark.parametrize(
    "command", ["", "take apple", "put apple", "heat apple", "fly", "go to moon", "use lamp"]
)
def test_what_cannot_be_done_changes_nothing(command: str) -> None:
    game = home(Chore("put", "apple", "table"))
    before = str(game.house)
    step = game.step(ot.Action(command))
    assert shown(step) == "Nothing happens."
    assert step.observation is not None
    assert list(step.observation.legal_actions) == game.commands()
    assert (str(game.house), game.at) == (before, "")
    assert game.metrics() == {"turns": 1.0, "invalid": 1.0}


def test_commands_run_out() -> None:
    game = Household(turns=3)
    game.reset(seed=0, task={})
    steps = [game.step(ot.Action("look")) for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert (steps[2].reward.value, steps[2].truncated) == (0.0, True)


def test_the_whole_episode_is_worth_what_was_done() -> None:
    game = home(Chore("put", "apple", "table"))
    play(game, "go to fridge", "open fridge", "take apple")
    # A limit of the loop may stop it here: not done is 0, and never an episode without a reward.
    assert game.finalize() == 0.0
    play(game, "go to table", "put apple")
    assert game.finalize() == 1.0


def done_by(make: Any, chore: str, houses: int = 20) -> float:
    """The share of held-out houses in which the chore gets done."""
    total = 0.0
    for number in range(houses):
        game, dice, script = Household(chores=[chore], turns=30), random.Random(number), make()
        seen = game.reset(seed=0, task={"house": number})
        while not (step := game.step(ot.Action(script(seen, dice)))).done:
            assert step.observation is not None
            seen = step.observation
        total += step.reward.value or 0.0
    return total / houses


@pytest.mark.parametrize("chore", CHORES)
def test_every_chore_can_be_done_and_not_by_chance(chore: str) -> None:
    assert done_by(Resident, chore) == 1.0
    assert done_by(lambda: wanderer, chore) < 0.3


@pytest.mark.parametrize("size", [4, 8, 16])
def test_houses_hold_together(size: int) -> None:
    for seed in range(200):
        house = build(random.Random(seed), size, CHORES)
        assert len(set(house.places)) == len(house.places) <= size
        assert {*house.things.values(), house.lamp, house.chore.place} <= set(house.places)
        assert not house.done()
        assert len(house.wanted()) == (2 if house.chore.kind == "two" else 1)


def test_held_out_houses_are_never_drawn() -> None:
    game = Household()
    tasks = game.tasks("test") or ()
    assert len({task["house"] for task in tasks}) == len(tasks) == HELD_OUT
    assert all(held_out(game.build(f"test {task['house']}")) for task in tasks)
    assert not any(held_out(game.draw(seed)) for seed in range(300))
    assert game.draw(1) == game.draw(1) != game.draw(2)


@pytest.mark.parametrize(
    "options", [{"size": 3}, {"size": 17}, {"turns": 0}, {"chores": []}, {"chores": ["cook"]}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Household(**options)
