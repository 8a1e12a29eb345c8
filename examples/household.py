"""Train an agent to do chores in generated houses: a text game of many turns, in the manner of ALFWorld.

    python examples/household.py

It walks between pieces of furniture, opens them, takes, cleans, heats and cools things and puts them where
they belong. Houses of the split "test" are never drawn in training.
"""

import argparse
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 60
ROOMS = {
    "kitchen": ("fridge", "sink", "microwave", "table", "counter", "cupboard"),
    "bedroom": ("bed", "desk", "drawer", "shelf"),
    "bathroom": ("basin", "cabinet", "towel rack"),
    "living room": ("sofa", "sideboard", "armchair"),
}
CLOSED = {"fridge", "microwave", "cupboard", "drawer", "cabinet"}
"""These must be opened before one sees what is inside."""
FOOD = ("apple", "potato", "tomato", "egg", "bread")
DISHES = ("cup", "plate", "bowl", "fork")
OTHERS = ("book", "pen", "watch", "pillow", "soap", "phone")
CHANGES = {"clean": ("sink", FOOD + DISHES), "heat": ("microwave", FOOD), "cool": ("fridge", FOOD + DISHES)}
"""What can be done to things: where, and to which."""
DONE = {"clean": "clean", "heat": "hot", "cool": "cool"}
CHORES = ("put", "clean", "heat", "cool", "look", "two")


@dataclass(frozen=True)
class Chore:
    """What is to be done with things of a kind; for "look" `place` is where the lamp stands."""

    kind: str
    thing: str
    place: str

    def __str__(self) -> str:
        if self.kind == "look":
            return f"look at the {self.thing} under the lamp"
        if self.kind == "two":
            return f"put two {self.thing}s {on(self.place)}"
        state = f"{DONE[self.kind]} " if self.kind in DONE else ""
        return f"put a {state}{self.thing} {on(self.place)}"


@dataclass
class House:
    """Its furniture by room, what lies where, where the lamp is, and the chore."""

    rooms: dict[str, list[str]]
    things: dict[str, str]
    """Where each thing is: a piece of furniture, or "" in the hand."""
    lamp: str
    chore: Chore
    states: dict[str, set[str]] = field(default_factory=dict)
    """What was done to each: clean, hot, cool."""

    @property
    def places(self) -> list[str]:
        """All furniture."""
        return [place for room in self.rooms.values() for place in room]

    def wanted(self) -> list[str]:
        """The things of the kind that the chore is about."""
        return [thing for thing in self.things if kind_of(thing) == self.chore.thing]

    def done(self) -> bool:
        """Whether the chore is, as the house is now. Looking is an act: it is not seen afterwards."""
        there = [thing for thing in self.wanted() if self.things[thing] == self.chore.place]
        if self.chore.kind == "look":
            return False
        if self.chore.kind == "two":
            return len(there) > 1
        state = DONE.get(self.chore.kind)
        return any(state is None or state in self.states.get(thing, ()) for thing in there)


def build(dice: random.Random, size: int, chores: Sequence[str]) -> House:
    """A house of up to `size` pieces of furniture, and as many things, with something to do."""
    kind = dice.choice(chores)
    names = dice.sample(list(ROOMS), len(ROOMS))
    if kind in CHANGES:
        names = ["kitchen", *(room for room in names if room != "kitchen")]
    rooms: dict[str, list[str]] = {}
    for name in names:
        missing = size - sum(map(len, rooms.values()))
        if missing > 0:
            rooms[name] = sorted(dice.sample(ROOMS[name], min(missing, dice.randint(3, len(ROOMS[name])))))
    if kind in CHANGES and (needed := CHANGES[kind][0]) not in rooms["kitchen"]:
        rooms["kitchen"][-1] = needed
    places = [place for room in rooms.values() for place in room]
    goal = dice.choice([place for place in places if kind not in CHANGES or place != CHANGES[kind][0]])
    thing = dice.choice(CHANGES[kind][1] if kind in CHANGES else FOOD + DISHES + OTHERS)
    names_of = [f"{thing} 1", f"{thing} 2"] if kind == "two" else [thing]
    elsewhere = [place for place in places if place != goal]
    things = {each: dice.choice(elsewhere) for each in names_of}
    others = [each for each in FOOD + DISHES + OTHERS if each != thing]
    for other in dice.sample(others, max(0, min(size, len(others)) - len(things))):
        things[other] = dice.choice(places)
    return House(rooms, things, dice.choice(places) if kind != "look" else goal, Chore(kind, thing, goal))


class Household(ot.Environment):
    """Do a chore in a house that you do not know; 1 when it is done, 0 if it never is.

    The agent says one command a turn, out of those that it is told. What is none of them does nothing.
    """

    splits = ("test",)

    def __init__(self, size: int = 8, turns: int = 20, chores: Sequence[str] = CHORES) -> None:
        """`size` is how much furniture there is, and how many things; `turns` how many commands."""
        if not 4 <= size <= 16:
            raise ValueError(f"size must be from 4 to 16, not {size}")
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if not chores or not set(chores) <= set(CHORES):
            raise ValueError(f"chores must be some of {', '.join(CHORES)}, not {list(chores)}")
        self.size, self.turns, self.chores = size, turns, tuple(chores)

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.house = self.build(f"test {task['house']}") if task else self.draw(seed)
        self.at = ""
        self.opened: set[str] = set()
        self.used = self.invalid = 0
        self.score = 0.0
        rooms = ". ".join(
            f"{room.capitalize()}: {', '.join(each)}" for room, each in self.house.rooms.items()
        )
        return self.seen(f"{rooms}. The lamp is {on(self.house.lamp)}. Your chore: {self.house.chore}.")

    def step(self, action: ot.Action) -> ot.StepResult:
        self.used += 1
        command = action.text.strip()
        told, looked = "Nothing happens.", False
        if command in self.commands():
            told, looked = self.obey(command)
        else:
            self.invalid += 1
        if looked or self.house.done():
            self.score = 1.0
            return ot.StepResult(told, reward=1.0, terminated=True)
        if self.used == self.turns:
            return ot.StepResult(told, reward=0.0, truncated=True)
        return ot.StepResult(self.seen(told))

    def commands(self) -> list[str]:
        """What can be done now."""
        found = [f"go to {place}" for place in self.house.places if place != self.at]
        if not self.at:
            return found
        if self.at not in self.opened and self.at in CLOSED:
            return [*found, f"open {self.at}"]
        held = self.held
        if held is None:
            return found + [f"take {thing}" for thing in self.inside()]
        found.append(f"put {held}")
        for change, (place, kinds) in CHANGES.items():
            if place == self.at and kind_of(held) in kinds:
                found.append(f"{change} {held}")
        return [*found, "use lamp"] if self.at == self.house.lamp else found

    def obey(self, command: str) -> tuple[str, bool]:
        """What comes of a command, and whether it was the look under the lamp that the chore asks for."""
        house, (verb, _, rest) = self.house, command.partition(" ")
        if verb == "go":
            self.at = rest.removeprefix("to ")
            return self.described(), False
        if verb == "open":
            self.opened.add(self.at)
            return self.described(), False
        if verb == "take":
            house.things[rest] = ""
            return f"You hold the {rest}.", False
        held = self.held
        assert held is not None, "the other commands are told to those that hold something only"
        if verb == "put":
            house.things[held] = self.at
            return f"The {held} is {on(self.at)}.", False
        if verb == "use":
            wanted = house.chore.kind == "look" and kind_of(held) == house.chore.thing
            return f"You see the {held} in the light.", wanted
        states = house.states.setdefault(held, set())
        # What is heated is no longer cool, and the other way round.
        states -= {"heat": {"cool"}, "cool": {"hot"}}.get(verb, set())
        states.add(DONE[verb])
        return f"The {held} is {DONE[verb]}.", False

    @property
    def held(self) -> str | None:
        """What is in the hand."""
        return next((thing for thing, place in self.house.things.items() if not place), None)

    def inside(self) -> list[str]:
        """What lies where the agent stands."""
        return [thing for thing, place in self.house.things.items() if place == self.at]

    def described(self) -> str:
        """What one sees there."""
        if self.at in CLOSED and self.at not in self.opened:
            return f"The {self.at} is closed."
        things = ", ".join(f"{'an' if each[0] in 'aeiou' else 'a'} {each}" for each in self.inside())
        return f"{on(self.at).capitalize()}: {things or 'nothing'}."

    def seen(self, text: str) -> ot.Observation:
        """A text and what can be done."""
        chore = self.house.chore
        goal = {"kind": chore.kind, "thing": chore.thing, "place": chore.place, "lamp": self.house.lamp}
        info = {
            "goal": goal,
            "at": self.at,
            "held": self.held,
            "states": sorted(self.house.states.get(self.held or "", ())),
        }
        return ot.Observation(text, info=info, legal_actions=self.commands())

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        houses = (number for number in range(100_000) if held_out(self.build(f"test {number}")))
        return [{"house": number} for number, _ in zip(houses, range(HELD_OUT), strict=False)]

    def draw(self, seed: int) -> House:
        """A house for training."""
        attempt = 0
        while held_out(house := self.build(f"train {seed} {attempt}")):
            attempt += 1
        return house

    def build(self, seed: str) -> House:
        """Any house."""
        return build(random.Random(seed), self.size, self.chores)

    def finalize(self) -> float:
        # Who is stopped by a limit has not done it: that is 0, not an episode without a reward.
        return self.score

    def metrics(self) -> dict[str, float]:
        return {"turns": float(self.used), "invalid": float(self.invalid)}


def held_out(house: House) -> bool:
    """One in eight houses is for tests only, whoever builds it."""
    return zlib.crc32(f"{house.rooms} {house.things} {house.lamp} {house.chore}".encode()) % 8 == 0


def on(place: str) -> str:
    """In or on a piece of furniture."""
    return f"{'in' if place in CLOSED or place in ('sink', 'basin') else 'on'} the {place}"


def kind_of(thing: str) -> str:
    """The kind of a thing: that of "cup 2" is cup."""
    return thing.split(" ")[0]


class Resident:
    """Does any chore by what it is told: it looks everywhere once, then does what is to be done. A script to
    compare with, and for demonstrations.
    """

    def __init__(self) -> None:
        self.visited: set[str] = set()

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        """Its next command."""
        legal, info = seen.legal_actions, seen.info
        goal, at, held = info["goal"], info["at"], info["held"]
        opens = [each for each in legal if each.startswith("open ")]
        if held is None:
            takes = [
                each for each in legal if each.startswith("take ") and kind_of(each[5:]) == goal["thing"]
            ]
            if takes and at != goal["place"]:
                return takes[0]
            if opens:
                return opens[0]
            self.visited.add(at)
            ways = [each for each in legal if each.startswith("go ") and each[6:] not in self.visited]
            # What it seeks may lie where it has looked already, once it has put something down.
            return dice.choice(ways or [each for each in legal if each.startswith("go ")])
        self.visited -= {at}
        last = "use lamp" if goal["kind"] == "look" else f"put {held}"
        state, target = DONE.get(goal["kind"]), goal["place"]
        if state is not None and state not in info["states"]:
            last, target = f"{goal['kind']} {held}", CHANGES[goal["kind"]][0]
        if at != target:
            return f"go to {target}"
        return last if last in legal else opens[0]


def wanderer(seen: ot.Observation, dice: random.Random) -> str:
    """Any command."""
    return dice.choice(seen.legal_actions)


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--size", type=int, default=6, help="pieces of furniture, and things")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 episodes in each step")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out houses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/household"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=Household,
            env_options={"size": arguments.size, "turns": arguments.turns},
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=10),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "Chores in generated houses")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
