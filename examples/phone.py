"""Train an agent to use a phone: it taps, types and scrolls through apps, in the manner of AndroidWorld.

    python examples/phone.py

Settings, contacts, a clock and messages, all simulated. The agent sees the screen as a list of elements (and,
if asked for, as a picture) and says one action a turn as JSON. What counts is the phone's state at the end,
compared as a whole: what was changed by the way counts against it. Phones of the split "test" are never drawn
in training.
"""

import argparse
import copy
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 60
ROWS = 5
"""Elements that a screen shows at once; the others are scrolled to."""
SWITCHES = (
    "Wi-Fi",
    "Bluetooth",
    "Airplane mode",
    "Dark theme",
    "Location",
    "Battery saver",
    "Hotspot",
    "Night light",
)
NAMES = ("Ann", "Bob", "Cora", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kofi", "Lena")
TEXTS = ("On my way", "Running late", "Call me", "Happy birthday", "See you at noon", "Thank you")
HOW = (
    'Actions, one a turn: {"tap": 2} the element of that number, {"type": "text"} into the field tapped, '
    '{"scroll": "down"} or "up", {"back": 1}, {"done": 1} when all is as it should be.'
)


@dataclass
class Phone:
    """All that apps keep."""

    switches: dict[str, bool] = field(default_factory=dict)
    contacts: dict[str, str] = field(default_factory=dict)
    """Numbers by name."""
    alarms: dict[str, bool] = field(default_factory=dict)
    """Whether each is on, by time."""
    sent: list[tuple[str, str]] = field(default_factory=list)
    """Messages: to whom, and what."""


@dataclass(frozen=True)
class Goal:
    """What is wanted, in words, and how the phone is when it is done. `plan` is a way there: labels to tap,
    texts to type, marked by "=", and "<" to go back. "number of NAME" is what the screen says of a contact.
    """

    words: str
    after: Phone
    plan: tuple[str, ...]


def switch(phone: Phone, dice: random.Random) -> Goal:
    """Turn something on or off."""
    name = dice.choice(list(phone.switches))
    after = copy.deepcopy(phone)
    after.switches[name] = not phone.switches[name]
    return Goal(f"Turn {name} {'on' if after.switches[name] else 'off'}.", after, ("Settings", name))


def alarm(phone: Phone, dice: random.Random) -> Goal:
    """Turn an alarm on or off."""
    time = dice.choice(list(phone.alarms))
    after = copy.deepcopy(phone)
    after.alarms[time] = not phone.alarms[time]
    return Goal(f"Turn the alarm at {time} {'on' if after.alarms[time] else 'off'}.", after, ("Clock", time))


def new_alarm(phone: Phone, dice: random.Random) -> Goal:
    """Set an alarm that there is not."""
    time = clock(dice, phone.alarms)
    after = copy.deepcopy(phone)
    after.alarms[time] = True
    return Goal(f"Set an alarm for {time}.", after, ("Clock", "New alarm", "Time", f"={time}", "Save"))


def new_contact(phone: Phone, dice: random.Random) -> Goal:
    """Add a contact."""
    name = dice.choice([name for name in NAMES if name not in phone.contacts])
    number = digits(dice)
    after = copy.deepcopy(phone)
    after.contacts[name] = number
    plan = ("Contacts", "New contact", "Name", f"={name}", "Number", f"={number}", "Save")
    return Goal(f"Add {name} with the number {number} to the contacts.", after, plan)


def delete(phone: Phone, dice: random.Random) -> Goal:
    """Delete a contact."""
    name = dice.choice(list(phone.contacts))
    after = copy.deepcopy(phone)
    del after.contacts[name]
    return Goal(f"Delete the contact {name}.", after, ("Contacts", name, "Delete"))


def message(phone: Phone, dice: random.Random) -> Goal:
    """Send somebody a text."""
    name, text = dice.choice(list(phone.contacts)), dice.choice(TEXTS)
    after = copy.deepcopy(phone)
    after.sent.append((name, text))
    plan = ("Messages", "New message", f"To {name}", "Text", f"={text}", "Send")
    return Goal(f'Send {name} the message "{text}".', after, plan)


def forward(phone: Phone, dice: random.Random) -> Goal:
    """Send somebody the number of another: it must be looked up in one app and typed in another."""
    name, whose = dice.sample(list(phone.contacts), 2)
    after = copy.deepcopy(phone)
    after.sent.append((name, phone.contacts[whose]))
    plan = (
        "Contacts",
        whose,
        "<",
        "<",
        "Messages",
        "New message",
        f"To {name}",
        "Text",
        f"=number of {whose}",
        "Send",
    )
    return Goal(f"Send {name} the number of {whose}, as a message.", after, plan)


KINDS: dict[str, Callable[[Phone, random.Random], Goal]] = {
    "switch": switch,
    "alarm": alarm,
    "new alarm": new_alarm,
    "new contact": new_contact,
    "delete": delete,
    "message": message,
    "forward": forward,
}


@dataclass(frozen=True)
class Element:
    """One line of a screen. `opens` is the screen that a tap leads to; `does` what it changes."""

    kind: str
    label: str
    value: str = ""
    opens: str = ""
    does: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.label}" + (f": {self.value}" if self.kind != "button" else "")


class Apps:
    """The apps of one phone as one goes through them: a stack of screens, a draft, the field in focus."""

    def __init__(self, phone: Phone) -> None:
        self.phone = phone
        self.stack = ["Home"]
        self.top = 0
        """First element that is shown."""
        self.draft: dict[str, str] = {}
        self.focus = ""

    @property
    def screen(self) -> str:
        """Where the agent is."""
        return self.stack[-1]

    def elements(self) -> list[Element]:
        """All of the screen, whether they are in view or not."""
        name, phone = self.screen, self.phone
        match name:
            case "Home":
                return [
                    Element("button", app, opens=app) for app in ("Clock", "Contacts", "Messages", "Settings")
                ]
            case "Settings":
                return [self.switch(phone.switches, label) for label in phone.switches]
            case "Clock":
                alarms = [self.switch(phone.alarms, time) for time in sorted(phone.alarms)]
                return [Element("button", "New alarm", opens="New alarm"), *alarms]
            case "New alarm":
                return [self.field("Time"), Element("button", "Save", does=self.save_alarm)]
            case "Contacts":
                people = [Element("button", each, opens=f"Contact {each}") for each in sorted(phone.contacts)]
                return [Element("button", "New contact", opens="New contact"), *people]
            case "New contact":
                save = Element("button", "Save", does=self.save_contact)
                return [self.field("Name"), self.field("Number"), save]
            case "Messages":
                told = [Element("text", to, text) for to, text in phone.sent]
                return [Element("button", "New message", opens="New message"), *told]
            case "New message":
                to = self.draft.get("To", "")
                people = [
                    Element("button", f"To {each}", does=partial(self.draft.update, To=each))
                    for each in sorted(phone.contacts)
                ]
                fields = [
                    Element("text", "To", to),
                    self.field("Text"),
                    Element("button", "Send", does=self.send),
                ]
                return fields if to else people
            case _:
                person = name.removeprefix("Contact ")
                delete = Element("button", "Delete", does=lambda: self.forget(person))
                return [Element("text", "Number", phone.contacts[person]), delete]

    def switch(self, values: dict[str, bool], label: str) -> Element:
        """A switch of one of the dictionaries."""

        def flip() -> None:
            values[label] = not values[label]

        return Element("switch", label, "on" if values[label] else "off", does=flip)

    def field(self, label: str) -> Element:
        """A field of the draft."""

        def take() -> None:
            self.focus = label

        return Element("field", label, self.draft.get(label, ""), does=take)

    def save_alarm(self) -> None:
        time = self.draft.get("Time", "")
        if re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", time):
            self.phone.alarms[time] = True
            self.back()

    def save_contact(self) -> None:
        name, number = self.draft.get("Name", ""), self.draft.get("Number", "")
        if name and number.isdigit():
            self.phone.contacts[name] = number
            self.back()

    def send(self) -> None:
        if self.draft.get("Text"):
            self.phone.sent.append((self.draft["To"], self.draft["Text"]))
            self.back()

    def forget(self, person: str) -> None:
        del self.phone.contacts[person]
        self.back()

    def tap(self, number: int) -> bool:
        """Tap what stands at a place of the view; whether there is something."""
        shown = self.shown()
        if not 1 <= number <= len(shown):
            return False
        element = shown[number - 1]
        if element.does is not None:
            before = self.screen, self.draft.get("To")
            element.does()
            if before != (self.screen, self.draft.get("To")):
                self.top = 0
        elif element.opens:
            self.stack.append(element.opens)
            self.top, self.draft, self.focus = 0, {}, ""
        return True

    def type(self, text: str) -> bool:
        """Fill the field in focus; whether there is one."""
        if self.focus:
            self.draft[self.focus] = text
        return bool(self.focus)

    def scroll(self, down: bool) -> bool:
        """Move the view by a page; whether there was more."""
        top = self.top + (ROWS if down else -ROWS)
        if not 0 <= top < len(self.elements()):
            return False
        self.top = top
        return True

    def back(self) -> bool:
        """Leave the screen; whether there is one behind it."""
        if len(self.stack) == 1:
            return False
        self.stack.pop()
        self.top, self.draft, self.focus = 0, {}, ""
        return True

    def shown(self) -> list[Element]:
        """The elements in view."""
        return self.elements()[self.top : self.top + ROWS]

    def lines(self) -> list[str]:
        """The view as text: a title, and a line for each element."""
        below = len(self.elements()) - self.top - ROWS
        more = [word for word, there in (("up", self.top > 0), ("down", below > 0)) if there]
        scroll = f" (more {' and '.join(more)})" if more else ""
        return [f"{self.screen}{scroll}", *(f"{at}. {each}" for at, each in enumerate(self.shown(), 1))]


def picture(lines: Sequence[str]) -> ot.Image:
    """A screenshot: a title bar, and a bar for each element, with a knob where it is a switch."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (280, 56 * (ROWS + 1)), (245, 245, 245))
    pen = ImageDraw.Draw(image)
    pen.rectangle([0, 0, 280, 50], (60, 90, 160))
    pen.text((10, 18), lines[0], (255, 255, 255))
    for row, line in enumerate(lines[1:], 1):
        pen.rectangle([4, 56 * row, 275, 56 * row + 50], (255, 255, 255), (190, 190, 190))
        pen.text((12, 56 * row + 18), line, (20, 20, 20))
        if re.match(r"\d+\. switch ", line):
            on = line.endswith(": on")
            pen.ellipse([246, 56 * row + 15, 266, 56 * row + 35], (40, 160, 60) if on else (170, 170, 170))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return ot.Image(buffer.getvalue())


class PhoneUse(ot.Environment):
    """Do what is asked on a phone: 1 if exactly that has changed when the agent says that it is done."""

    splits = ("test",)

    def __init__(
        self, kinds: Sequence[str] = tuple(KINDS), turns: int = 16, items: int = 7, screenshots: bool = False
    ) -> None:
        """`items`: how many contacts, alarms and switches there are; `screenshots`: for vision models."""
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if not 2 <= items <= len(SWITCHES):
            raise ValueError(f"items must be from 2 to {len(SWITCHES)}, not {items}")
        self.kinds, self.turns, self.items, self.screenshots = tuple(kinds), turns, items, screenshots

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        phone, self.goal = self.build(f"test {task['phone']}") if task else self.draw(seed)
        self.apps = Apps(phone)
        self.used = self.invalid = 0
        return self.seen(f"{self.goal.words}\n{HOW}\n")

    def step(self, action: ot.Action) -> ot.StepResult:
        self.used += 1
        act = read(action.text)
        if act == ("done", 1):
            return ot.StepResult(reward=float(self.apps.phone == self.goal.after), terminated=True)
        worked = act is not None and self.act(*act)
        self.invalid += not worked
        if self.used == self.turns:
            return ot.StepResult(reward=0.0, truncated=True)
        return ot.StepResult(self.seen("" if worked else "That does nothing here.\n"))

    def act(self, name: str, value: Any) -> bool:
        """Do it; whether it did anything."""
        match name:
            case "tap":
                return self.apps.tap(value)
            case "type":
                return self.apps.type(value)
            case "scroll":
                return self.apps.scroll(value == "down")
            case _:
                return self.apps.back()

    def seen(self, before: str) -> ot.Observation:
        """The screen."""
        lines = self.apps.lines()
        text = before + "\n".join(lines)
        info = {"plan": self.goal.plan, "state": asdict(self.apps.phone)}
        return ot.Observation([text, picture(lines)] if self.screenshots else text, info=info)

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found = (number for number in range(100_000) if held_out(*self.build(f"test {number}")))
        return [{"phone": number} for number, _ in zip(found, range(HELD_OUT), strict=False)]

    def draw(self, seed: int) -> tuple[Phone, Goal]:
        """A phone and a goal for training."""
        attempt = 0
        while held_out(*(drawn := self.build(f"train {seed} {attempt}"))):
            attempt += 1
        return drawn

    def build(self, seed: str) -> tuple[Phone, Goal]:
        """Any phone, and a goal for it."""
        dice = random.Random(seed)
        phone = Phone()
        phone.switches = {name: dice.random() < 0.5 for name in dice.sample(SWITCHES, self.items)}
        phone.contacts = {name: digits(dice) for name in dice.sample(NAMES, self.items)}
        for _ in range(self.items):
            phone.alarms[clock(dice, phone.alarms)] = dice.random() < 0.5
        return phone, KINDS[dice.choice(self.kinds)](phone, dice)

    def metrics(self) -> dict[str, float]:
        return {"turns": float(self.used), "invalid": float(self.invalid)}


def held_out(phone: Phone, goal: Goal) -> bool:
    """One in eight phones is for tests only, whoever draws it."""
    return zlib.crc32(f"{phone} {goal.words}".encode()) % 8 == 0


def read(said: str) -> tuple[str, Any] | None:
    """The one action that a text holds, if it is one."""
    try:
        value = json.loads(said.strip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((name, argument),) = value.items()
    fits = {
        "tap": type(argument) is int,
        "type": isinstance(argument, str),
        "scroll": argument in ("down", "up"),
        "back": argument == 1,
        "done": argument == 1,
    }
    return (name, argument) if fits.get(name) else None


def clock(dice: random.Random, taken: dict[str, bool]) -> str:
    """A time that is not taken."""
    while (time := f"{dice.randint(5, 22):02}:{dice.randrange(0, 60, 5):02}") in taken:
        pass
    return time


def digits(dice: random.Random) -> str:
    """A telephone number."""
    return f"555{dice.randrange(10_000):04}"


class Owner:
    """Knows the way to every goal, and reads the screen: what is not in view it scrolls to. A script to
    compare with, and for demonstrations.
    """

    def __init__(self) -> None:
        self.at = 0
        self.learned: dict[str, str] = {}

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        """Its next action."""
        plan = seen.info["plan"]
        if self.at == len(plan):
            return json.dumps({"done": 1})
        assert seen.content is not None
        told = seen.content.parts[0]
        assert not isinstance(told, ot.Image), "the text comes first"
        step, text = plan[self.at], getattr(told, "text", "")
        if number := re.search(r"^Contact (\w+)\n1\. text Number: (\d+)$", text, re.M):
            self.learned[f"number of {number[1]}"] = number[2]
        if step == "<":
            self.at += 1
            return json.dumps({"back": 1})
        if step.startswith("="):
            self.at += 1
            return json.dumps({"type": self.learned.get(step[1:], step[1:])})
        line = re.search(rf"^(\d)\. \w+ {re.escape(step)}(: .*)?$", text, re.M)
        if line is None:
            return json.dumps({"scroll": "down"})
        self.at += 1
        return json.dumps({"tap": int(line[1])})


def fumbler(seen: ot.Observation, dice: random.Random) -> str:
    """Acts at random, and sometimes says that it is done."""
    return json.dumps(
        dice.choice([{"tap": dice.randint(1, ROWS)}] * 5 + [{"scroll": "down"}, {"back": 1}, {"done": 1}])
    )


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--screenshots", action="store_true", help="show pictures too; for vision models")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 episodes in each step")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out phones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/phone"))
    arguments = parser.parse_args()
    options = {"kinds": arguments.kinds, "turns": arguments.turns, "screenshots": arguments.screenshots}
    with ot.connect():
        trained = ot.fit(
            env=PhoneUse,
            env_options=options,
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=24),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "What is asked of a phone")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
