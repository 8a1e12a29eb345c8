"""Train a vision-language policy to answer questions about figures that are drawn here.

    python examples/geometry.py --model qwen2.5-vl-3b-instruct

Counts, lengths, areas, sides and angles; the answer is a number and is checked exactly. Figures of the split
"test" are never drawn in training. Needs Pillow.
"""

import argparse
import io
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 100
MOST = 20
"""Shapes to count."""
CELL = 28
"""Pixels of a unit: what a model of Qwen's kind makes one position of."""
PAPER, INK = (255, 255, 255), (20, 20, 20)
COLOURS = {"red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220)}
SHAPES = ("circle", "square", "triangle")
INSTRUCTION = "Answer with a number only."

_ANSWER = re.compile(r"\s*(\d{1,4})\s*")


@dataclass(frozen=True)
class Mark:
    """A shape by the corner of its box, in units; or a line, polygon, rectangle or corner by its points."""

    kind: str
    colour: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Figure:
    """What is drawn, what is asked, and what is right."""

    question: str
    answer: int
    marks: tuple[Mark, ...]
    grid: bool = False


def count(dice: random.Random, size: int) -> Figure:
    """Shapes in cells of their own; those of one kind are counted."""
    places = [(x, y) for x in range(size) for y in range(size)]
    cells = dice.sample(places, dice.randint(min(size, MOST), min(len(places), MOST)))
    asked = dice.choice(SHAPES)
    kinds = [dice.choice(SHAPES) for _ in cells]
    marks = tuple(
        Mark(kind, dice.choice(list(COLOURS)), (cell,)) for kind, cell in zip(kinds, cells, strict=True)
    )
    return Figure(f"How many {asked}s are there?", kinds.count(asked), marks)


def length(dice: random.Random, size: int) -> Figure:
    """Two lines along the grid, of which one is asked for."""
    asked, other = dice.sample(list(COLOURS), 2)
    rows = dice.sample(range(size), 2)
    upright = dice.random() < 0.5
    spans = [dice.randint(1, size) for _ in rows]
    marks = []
    for colour, row, span in zip((asked, other), rows, spans, strict=True):
        start = dice.randint(0, size - span)
        ends = ((start, row + 0.5), (start + span, row + 0.5))
        marks.append(Mark("line", colour, tuple((y, x) if upright else (x, y) for x, y in ends)))
    return Figure(f"How many squares long is the {asked} line?", spans[0], tuple(marks), grid=True)


def area(dice: random.Random, size: int) -> Figure:
    """A rectangle on a grid."""
    width, height = dice.randint(1, size), dice.randint(1, size)
    x, y = dice.randint(0, size - width), dice.randint(0, size - height)
    mark = Mark("rectangle", dice.choice(list(COLOURS)), ((x, y), (x + width, y + height)))
    return Figure("How many squares does the rectangle cover?", width * height, (mark,), grid=True)


def sides(dice: random.Random, size: int) -> Figure:
    """A regular polygon, turned and moved."""
    corners, turn = dice.randint(3, 8), dice.uniform(0, math.tau)
    radius = size * dice.uniform(0.3, 0.45)
    middle = [dice.uniform(radius, size - radius) for _ in range(2)]
    angles = [turn + math.tau * corner / corners for corner in range(corners)]
    points = tuple((middle[0] + radius * math.cos(a), middle[1] + radius * math.sin(a)) for a in angles)
    return Figure(
        "How many sides does the figure have?",
        corners,
        (Mark("polygon", dice.choice(list(COLOURS)), points),),
    )


def angle(dice: random.Random, size: int) -> Figure:
    """Two rays from a corner; angles are multiples of 15 degrees."""
    degrees, turn = 15 * dice.randint(1, 11), dice.uniform(0, math.tau)
    middle, reach = size / 2, size * 0.48
    rays = [turn, turn + math.radians(degrees)]
    ends = [(middle + reach * math.cos(a), middle + reach * math.sin(a)) for a in rays]
    mark = Mark("corner", dice.choice(list(COLOURS)), (ends[0], (middle, middle), ends[1]))
    return Figure("How many degrees has the angle?", degrees, (mark,))


KINDS: dict[str, Callable[[random.Random, int], Figure]] = {
    "count": count,
    "length": length,
    "area": area,
    "sides": sides,
    "angle": angle,
}


def draw(figure: Figure, size: int) -> bytes:
    """The figure as a PNG of `size` units a side."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size * CELL, size * CELL), PAPER)
    pen = ImageDraw.Draw(image)
    if figure.grid:
        for at in range(0, size * CELL, CELL):
            pen.line([(at, 0), (at, size * CELL)], (200, 200, 200))
            pen.line([(0, at), (size * CELL, at)], (200, 200, 200))
    for mark in figure.marks:
        colour = COLOURS[mark.colour]
        points = [(x * CELL, y * CELL) for x, y in mark.points]
        left, top = points[0]
        box = [left + 4, top + 4, left + CELL - 5, top + CELL - 5]
        match mark.kind:
            case "circle":
                pen.ellipse(box, colour)
            case "square":
                pen.rectangle(box, colour)
            case "triangle":
                pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) / 2, box[1])], colour)
            case "line" | "corner":
                pen.line(points, colour, width=6 if mark.kind == "line" else 3)
            case "rectangle":
                pen.rectangle([left, top, points[1][0] - 1, points[1][1] - 1], colour, INK)
            case _:
                pen.polygon(points, colour, INK)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Geometry(ot.Environment):
    """One figure, one question, one number: 1 if it is the right one, otherwise 0."""

    max_turns = 1
    splits = ("test",)

    def __init__(self, size: int = 8, kinds: Sequence[str] = tuple(KINDS)) -> None:
        """`size` of the figure in units of 28 pixels."""
        if not 2 <= size <= 32:
            raise ValueError(f"size must be from 2 to 32, not {size}")
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        self.size, self.kinds = size, tuple(kinds)

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.figure = self.figure_of(f"test {task['figure']}") if task else self.draw(seed)
        picture = ot.Image(draw(self.figure, self.size))
        info = {"question": self.figure.question, "answer": self.figure.answer}
        return ot.Observation([picture, f"{self.figure.question} {INSTRUCTION}"], info=info)

    def step(self, action: ot.Action) -> ot.StepResult:
        said = _ANSWER.fullmatch(action.text)
        right = said is not None and int(said[1]) == self.figure.answer
        return ot.StepResult(reward=float(right), terminated=True)

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found = (number for number in range(100_000) if held_out(self.figure_of(f"test {number}")))
        return [{"figure": number} for number, _ in zip(found, range(HELD_OUT), strict=False)]

    def draw(self, seed: int) -> Figure:
        """A figure for training."""
        return next(figure for figure in self.figures(seed) if not held_out(figure))

    def figures(self, seed: int) -> Iterator[Figure]:
        """Figures without end, the same for the same seed."""
        attempt = 0
        while True:
            yield self.figure_of(f"train {seed} {attempt}")
            attempt += 1

    def figure_of(self, seed: str) -> Figure:
        """Any figure."""
        dice = random.Random(seed)
        return KINDS[dice.choice(self.kinds)](dice, self.size)


def held_out(figure: Figure) -> bool:
    """One in eight figures is for tests only, whoever draws it."""
    return zlib.crc32(repr(figure).encode()) % 8 == 0


def expert(seen: ot.Observation, dice: random.Random) -> str:
    """Knows the answer."""
    return str(seen.info["answer"])


def guesser(seen: ot.Observation, dice: random.Random) -> str:
    """Says any small number, whatever is drawn."""
    return str(dice.randint(0, 9))


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a vision-language model of type qwen2_5_vl")
    parser.add_argument("--size", type=int, default=8, help="units of a figure's side")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 episodes in each step")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help="default: what serves models that see images")
    parser.add_argument("--out", type=Path, default=Path("runs/geometry"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=Geometry,
            env_options={"size": arguments.size, "kinds": arguments.kinds},
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=6),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "Questions about figures")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
