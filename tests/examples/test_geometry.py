"""The rules of examples/geometry.py: what is drawn is what is asked, and only the right number counts."""

import io
import random

import numpy as np
import PIL.Image
import pytest

import opentinker as ot
from examples import geometry
from examples.geometry import COLOURS, KINDS, Geometry, draw, expert, guesser, held_out
from tests.examples.playing import play, rewards


def pixels(figure: geometry.Figure, size: int) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(draw(figure, size))).convert("RGB")).astype(int)


def test_the_expert_is_right_and_a_guesser_seldom() -> None:
    assert set(rewards(Geometry, lambda: expert)) == {1.0}
    assert sum(rewards(Geometry, lambda: guesser)) / 200 < 0.3


@pytest.mark.parametrize("said", ["", "Answer:", "number", "?", "-", "0 1 2 3 4 5 6 7 8 9", "four"])
def test_the_form_alone_earns_nothing(said: str) -> None:
    assert set(rewards(Geometry, lambda: lambda seen, dice: said, 50)) == {0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_a_function_of_the_seed_and_differ(kind: str) -> None:
    environment = Geometry(6, [kind])
    first = [environment.draw(seed) for seed in range(40)]
    assert first == [environment.draw(seed) for seed in range(40)]
    assert len(set(first)) > 20
    assert len({figure.answer for figure in first}) > 3
    assert len({draw(figure, 6) for figure in first}) == len(set(first))


def test_what_is_held_out_is_never_drawn_in_training() -> None:
    environment = Geometry()
    tasks = environment.tasks("test")
    assert tasks is not None
    assert len(tasks) == geometry.HELD_OUT
    assert all(held_out(environment.figure_of(f"test {task['figure']}")) for task in tasks)
    assert not any(held_out(environment.draw(seed)) for seed in range(200))


def test_lengths_and_areas_are_those_of_the_pixels() -> None:
    for seed in range(40):
        figure = geometry.length(random.Random(seed), 6)
        line = (pixels(figure, 6) == COLOURS[figure.marks[0].colour]).all(axis=2)
        across, down = line.any(axis=0).sum(), line.any(axis=1).sum()
        other = (pixels(figure, 6) == COLOURS[figure.marks[1].colour]).all(axis=2)
        assert other.any()
        assert round(max(across, down) / geometry.CELL) == figure.answer
        figure = geometry.area(random.Random(seed), 6)
        inside = (pixels(figure, 6) == COLOURS[figure.marks[0].colour]).all(axis=2).sum()
        # Its edge is drawn in ink.
        assert 0.8 * figure.answer < inside / geometry.CELL**2 <= figure.answer


def test_counted_shapes_have_cells_of_their_own() -> None:
    for seed in range(40):
        figure = geometry.count(random.Random(seed), 4)
        shown = (pixels(figure, 4) != geometry.PAPER).any(axis=2)
        cells = shown.reshape(4, geometry.CELL, 4, geometry.CELL).any(axis=(1, 3))
        assert cells.sum() == len(figure.marks)
        asked = figure.question.split()[2].removesuffix("s")
        assert figure.answer == sum(mark.kind == asked for mark in figure.marks)


def test_angles_and_sides_are_measured() -> None:
    for seed in range(40):
        figure = geometry.angle(random.Random(seed), 6)
        one, middle, two = (np.array(point) for point in figure.marks[0].points)
        a, b = one - middle, two - middle
        degrees = np.degrees(np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
        assert round(float(degrees)) == figure.answer
        figure = geometry.sides(random.Random(seed), 6)
        assert len(set(figure.marks[0].points)) == figure.answer
        assert all(0 <= at <= 6 for point in figure.marks[0].points for at in point)


def test_the_observation_holds_a_picture_and_not_the_answer() -> None:
    environment = Geometry(4)
    seen = environment.reset(seed=1, task={})
    assert seen.content is not None
    picture, question = seen.content.parts
    assert isinstance(picture, ot.Image)
    assert question == ot.environments.Text(f"{environment.figure.question} {geometry.INSTRUCTION}")
    reward, _ = play(Geometry(4), expert, seed=1)
    assert reward == 1.0


@pytest.mark.parametrize("options", [{"size": 1}, {"kinds": []}, {"kinds": ["volume"]}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Geometry(**options)  # type: ignore[arg-type]
