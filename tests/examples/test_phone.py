"""The rules of examples/phone.py: the whole state counts, and nothing is had by saying that it is done."""

import io
import json
import random
from typing import Any

import PIL.Image
import pytest

import opentinker as ot
from examples import phone
from examples.phone import KINDS, Apps, Owner, Phone, PhoneUse, fumbler, held_out
from tests.examples.playing import play, rewards


@pytest.mark.parametrize("kind", KINDS)
def test_the_owner_reaches_every_goal_and_a_fumbler_hardly_any(kind: str) -> None:
    assert set(rewards(lambda: PhoneUse([kind]), Owner, 80)) == {1.0}
    assert sum(rewards(lambda: PhoneUse([kind]), lambda: fumbler, 80)) < 8


@pytest.mark.parametrize(
    "said", ["", '{"done": 1}', '{"back": 1}', '{"tap": 1}', "done", "{}", '{"type": "x"}']
)
def test_one_saying_is_never_enough(said: str) -> None:
    assert set(rewards(PhoneUse, lambda: lambda seen, dice: said, 60)) == {0.0}


def test_what_is_changed_by_the_way_counts_against_it() -> None:
    class Careless(Owner):
        """Flips another switch before it does what it should."""

        flips = 0

        def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
            plan, text = seen.info["plan"], seen.text
            if self.at == 1 and not self.flips:
                other = next(line for line in text.splitlines() if ". switch" in line and plan[1] not in line)
                self.flips = 1
                return json.dumps({"tap": int(other[0])})
            return super().__call__(seen, dice)

    assert set(rewards(lambda: PhoneUse(["switch"]), Careless, 60)) == {0.0}


def test_scrolling_shows_all_and_no_more() -> None:
    names = dict.fromkeys(phone.NAMES, "5550000")
    apps = Apps(Phone(contacts=names))
    assert apps.tap(2)
    seen = apps.shown()
    assert not apps.scroll(down=False)
    assert "more down" in apps.lines()[0]
    while apps.scroll(down=True):
        seen += apps.shown()
    assert "more up" in apps.lines()[0]
    assert "down" not in apps.lines()[0]
    assert [each.label for each in seen] == ["New contact", *sorted(names)]
    assert not apps.tap(phone.ROWS + 1)
    assert apps.back()
    assert not apps.back()


def test_nothing_is_typed_without_a_field_and_nothing_saved_half() -> None:
    apps = Apps(Phone())
    assert not apps.type("x")
    for tap in (2, 1, 1):
        apps.tap(tap)
    assert apps.type("Ann")
    apps.tap(3)
    assert apps.screen == "New contact"
    assert apps.phone == Phone()
    apps.tap(2)
    apps.type("5551234")
    apps.tap(3)
    assert apps.phone.contacts == {"Ann": "5551234"}
    assert apps.screen == "Contacts"
    # A draft does not outlive its screen.
    apps.tap(1)
    assert apps.elements()[0].value == ""


@pytest.mark.parametrize(
    "said",
    [
        '{"tap": "1"}',
        '{"tap": true}',
        '{"tap": 1, "back": 1}',
        "[1]",
        '{"scroll": "left"}',
        '{"fly": 1}',
        "[" * 10_000,
    ],
)
def test_what_is_no_action_is_told_and_does_nothing(said: str) -> None:
    environment = PhoneUse(turns=2)
    environment.reset(seed=0, task={})
    before = environment.apps.lines()
    step: Any = environment.step(ot.Action(said))
    assert step.observation.text.startswith("That does nothing here.")
    assert environment.apps.lines() == before
    assert environment.metrics() == {"turns": 1.0, "invalid": 1.0}
    last: Any = environment.step(ot.Action(said))
    assert last.truncated
    assert last.reward.value == 0.0


def test_phones_are_a_function_of_the_seed_and_those_held_out_are_never_drawn() -> None:
    environment = PhoneUse()
    assert environment.draw(3) == environment.draw(3) != environment.draw(4)
    tasks = environment.tasks("test")
    assert tasks is not None
    assert len(tasks) == phone.HELD_OUT
    assert all(held_out(*environment.build(f"test {task['phone']}")) for task in tasks)
    assert not any(held_out(*environment.draw(seed)) for seed in range(200))


def test_screenshots_show_each_screen() -> None:
    environment = PhoneUse(["switch"], screenshots=True)
    seen = environment.reset(seed=0, task={})
    assert seen.content is not None
    (home,) = seen.content.images
    assert PIL.Image.open(io.BytesIO(home.data)).size == (280, 336)
    step: Any = environment.step(ot.Action('{"tap": 4}'))
    (settings,) = step.observation.content.images
    before = settings.data
    step = environment.step(ot.Action('{"tap": 1}'))
    (flipped,) = step.observation.content.images
    assert len({home.data, before, flipped.data}) == 3
    reward, told = play(PhoneUse(["message"], screenshots=True), Owner(), seed=5)
    assert reward == 1.0
    assert told[0].startswith("Send ")


@pytest.mark.parametrize(
    "options", [{"kinds": []}, {"kinds": ["call"]}, {"turns": 0}, {"items": 1}, {"items": 9}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PhoneUse(**options)  # type: ignore[arg-type]
