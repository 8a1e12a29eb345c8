"""The late dataclass is the standard one, seen from everywhere but the clock."""

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest

import opentinker as ot
from opentinker import records

T = TypeVar("T")


def make(decorator: Callable[..., Any]) -> Any:
    @decorator(frozen=True, slots=True)
    class Point:
        """A point."""

        kind: ClassVar[str] = "point"
        x: int
        y: float = 0.5
        tags: list[str] = dataclasses.field(default_factory=list)
        secret: str = dataclasses.field(default="s", repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x")

        @property
        def total(self) -> float:
            return self.x + self.y

    return Point


@pytest.mark.parametrize(
    "use",
    [
        lambda P: repr(P(1)),
        lambda P: (P(1) == P(1), P(1) == P(2), P(1, secret="t") == P(1), P(1) == 1, P(1) != P(3)),
        lambda P: hash(P(1, 2.0, ())) == hash(P(1, 2.0, ())),  # type: ignore[arg-type]
        lambda P: P(1).tags is P(1).tags,
        lambda P: (P(y=3.0, x=1).total, P.kind, P.__doc__),
        lambda P: str(inspect.signature(P)),
        lambda P: str(inspect.signature(P.__init__)) if P(1) else "",
        lambda P: [(each.name, each.type) for each in dataclasses.fields(P)],
        lambda P: dataclasses.asdict(P(1)),
        lambda P: repr(dataclasses.replace(P(1), y=9.0)),
        lambda P: P.__match_args__,
        lambda P: P.__slots__,
        lambda P: hasattr(P(1), "__dict__"),
        lambda P: repr(copy.deepcopy(P(1, tags=["a"]))),
        lambda P: dataclasses.is_dataclass(P),
        lambda P: P.__init__.__qualname__ if P(1) else "",
    ],
)
def test_it_is_as_the_standard_one(use: Callable[[Any], Any]) -> None:
    assert use(make(records.dataclass)) == use(make(dataclasses.dataclass))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda P: P(),
        lambda P: P(1, z=2),
        lambda P: P(-1),
        lambda P: setattr(P(1), "x", 2),
        lambda P: delattr(P(1), "x"),
        lambda P: hash(P(1)),
    ],
)
def test_it_refuses_as_the_standard_one(misuse: Callable[[Any], Any]) -> None:
    raised = []
    for decorator in (records.dataclass, dataclasses.dataclass):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            misuse(make(decorator))
        raised.append(caught)
    ours, standard = raised
    assert ours.type is standard.type
    assert str(ours.value) == str(standard.value)


def test_a_new_attribute_is_refused_where_there_is_no_room_for_it() -> None:
    point = make(records.dataclass)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point(1).other = 2

    class Roomy(point):  # type: ignore[misc,valid-type]
        """Not a dataclass itself."""

    roomy = Roomy(1)
    roomy.other = 2
    assert roomy.other == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        roomy.x = 2
    del roomy.other


def test_own_methods_inheritance_and_generics() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Base(Generic[T]):
        """One with its own constructor and repr."""

        item: T

        def __init__(self, item: T) -> None:
            object.__setattr__(self, "item", item)

        def __repr__(self) -> str:
            return "mine"

    class Child(Base[int]):
        """Not decorated."""

    assert repr(Child(3)) == "mine"
    assert Child(3) == Child(3)
    assert Child(3) != Base(3)
    assert len({Base(3), Base(3)}) == 1

    class Plain(make(records.dataclass)):  # type: ignore[misc]
        """Its first use is through a subclass."""

    assert Plain(1).total == 1.5
    assert Plain(1) == Plain(1)


def test_a_dataclass_that_inherits_from_one() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Near(make(records.dataclass)):  # type: ignore[misc]
        z: int = 7

    assert repr(Near(1)).endswith("Near(x=1, y=0.5, tags=[], z=7)")
    assert Near(1) == Near(1) != Near(1, z=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Near(1).z = 2


def test_other_options_are_the_standard_ones() -> None:
    @records.dataclass
    class Mutable:
        x: int = 1

    @records.dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        x: int

    thing = Mutable()
    thing.x = 2
    assert thing == Mutable(2)
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[misc]


def test_public_values_survive_pickling() -> None:
    for value in (
        ot.LoRA(rank=4),
        ot.AdamW(lr=1e-3),
        ot.SamplingParams(max_tokens=5),
        ot.Message("user", "hi"),
    ):
        assert pickle.loads(pickle.dumps(value)) == value


def test_importing_writes_no_methods() -> None:
    """What the module is for: among all that is public hardly a class is written before it is used."""
    import subprocess

    code = (
        "import dataclasses, opentinker as ot\n"
        "count, standard = 0, dataclasses._process_class\n"
        "def counting(cls, init, *rest):\n"
        "    global count\n"
        "    count += init\n"
        "    return standard(cls, init, *rest)\n"
        "dataclasses._process_class = counting\n"
        "[getattr(ot, name) for name in ot.__all__]\n"
        "print(count)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 15
