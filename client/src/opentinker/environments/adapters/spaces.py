"""Gymnasium's spaces in words: observations to text, and what a model says to actions.

A space is known by its class's name and attributes, so that this needs neither the library nor numpy.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.environments.errors import EnvironmentDefinitionError

MASK = "action_mask"
"""Key of the mask of legal actions, in an observation or its info."""
MOST_NUMBERS = 512
"""An array with more of them is no text."""
MOST_LISTED = 64
"""A space with more actions is not listed."""

_NUMBERS = ("Box", "MultiBinary", "MultiDiscrete")
_JSON = re.compile(r"[\[{].*[\]}]", re.DOTALL)


class NoAction(ValueError):
    """What was said is no action of the space; the text is for the model."""


def kind(space: Any) -> str:
    """The name of the library's class that a space is of."""
    names = [cls.__name__ for cls in type(space).__mro__]
    return next((name for name in names if name in (*_NUMBERS, *_OTHERS)), names[0])


_OTHERS = ("Discrete", "Text", "Dict", "Tuple", "Sequence", "OneOf", "Graph")


def check_readable(space: Any, where: str = "observation_space") -> None:
    """EnvironmentDefinitionError if observations of a space have no text of their own."""
    match kind(space):
        case "Dict":
            for key, each in space.spaces.items():
                if key != MASK:
                    check_readable(each, f"{where}[{key!r}]")
        case "Tuple":
            for index, each in enumerate(space.spaces):
                check_readable(each, f"{where}[{index}]")
        case "Sequence":
            check_readable(space.feature_space, f"{where}[…]")
        case "Discrete" | "Text":
            return
        case "Box" | "MultiBinary" | "MultiDiscrete":
            size = 1
            for length in space.shape:
                size *= length
            if size > MOST_NUMBERS:
                raise EnvironmentDefinitionError(
                    f"{where} is an array of shape {tuple(space.shape)}, which is no text: pass render="
                )
        case other:
            raise EnvironmentDefinitionError(f"{where} is a {other}, which has no text: pass render=")


def in_words(space: Any, value: Any) -> str:
    """The text of an observation; the mask of legal actions is left out."""
    match kind(space):
        case "Text":
            return str(value)
        case "Discrete":
            return str(int(value))
        case "Dict":
            shown = {key: each for key, each in space.spaces.items() if key != MASK}
            if len(shown) == 1 < len(space.spaces):
                ((key, each),) = shown.items()
                return in_words(each, value[key])
            return "\n".join(f"{key}: {in_words(each, value[key])}" for key, each in shown.items())
        case "Tuple":
            return "\n".join(in_words(each, part) for each, part in zip(space.spaces, value, strict=True))
        case "Sequence":
            return "\n".join(in_words(space.feature_space, part) for part in value)
        case _:
            return json.dumps(_short(value.tolist() if hasattr(value, "tolist") else value))


def _short(value: Any) -> Any:
    """Numbers as people write them: six digits, and whole ones without a point."""
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value


def check_sayable(space: Any, where: str = "action_space") -> None:
    """EnvironmentDefinitionError if actions of a space cannot be read from text."""
    match kind(space):
        case "Dict":
            for key, each in space.spaces.items():
                check_sayable(each, f"{where}[{key!r}]")
        case "Tuple":
            for index, each in enumerate(space.spaces):
                check_sayable(each, f"{where}[{index}]")
        case "Discrete" | "Text" | "Box" | "MultiBinary" | "MultiDiscrete":
            return
        case other:
            raise EnvironmentDefinitionError(
                f"{where} is a {other}, which cannot be read from text: pass parse="
            )


class Sayable:
    """The actions of a space, as a model says them.

    Those of a Discrete space have names, by default their numbers: the last one that is said counts. Text
    is taken as it is, numbers as a JSON array, Dict and Tuple spaces as a JSON object or array.
    """

    def __init__(self, space: Any, names: Sequence[str] = ()) -> None:
        self._space = space
        self._numbers: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        if kind(space) == "Discrete":
            start, size = int(space.start), int(space.n)
            if names and len(names) != size:
                raise EnvironmentDefinitionError(f"actions: {len(names)} names for {size} actions")
            self.names = tuple(names) or tuple(str(start + place) for place in range(size))
            self._numbers = {name.lower(): start + place for place, name in enumerate(self.names)}
            if len(self._numbers) < size:
                raise EnvironmentDefinitionError(f"actions: names must differ, not {self.names}")
            known = "|".join(re.escape(name) for name in sorted(self._numbers, key=len, reverse=True))
            self._name = re.compile(rf"(?<![\w.-])(?:{known})(?!\w|\.\d)", re.IGNORECASE)
        elif names:
            raise EnvironmentDefinitionError(f"actions: only a Discrete space has names, not {kind(space)}")

    def legal(self, mask: Any) -> tuple[str, ...]:
        """The names of legal actions: those that the mask allows, or all where there are few."""
        if mask is not None:
            bits = [bool(bit) for bit in mask]
            if len(bits) != len(self.names):
                raise ValueError(f"a mask of {len(bits)} for {len(self.names)} actions")
            return tuple(name for name, bit in zip(self.names, bits, strict=True) if bit)
        return self.names if len(self.names) <= MOST_LISTED else ()

    def read(self, text: str, mask: Any = None) -> Any:
        """The action that a text says. NoAction."""
        if self._numbers:
            found = self._name.findall(text)
            if not found:
                raise NoAction("I see no action in that.")
            number = self._numbers[found[-1].lower()]
            if mask is not None and not mask[number - int(self._space.start)]:
                raise NoAction(f"{found[-1]} is not allowed now.")
            return number
        if kind(self._space) == "Text":
            action: Any = text
        else:
            json_text = _JSON.search(text) or _BARE.search(text)
            if not json_text:
                raise NoAction("I see no JSON in that.")
            try:
                action = of_json(self._space, json.loads(json_text.group()))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise NoAction(f"That is no action: {error}.") from None
        if not self._space.contains(action):
            raise NoAction(f"That is no action: it must be one of {self._space}.")
        return action


_BARE = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def of_json(space: Any, value: Any) -> Any:
    """The element of a space that a JSON value says. ValueError, TypeError."""
    match kind(space):
        case "Dict":
            if not isinstance(value, Mapping) or set(value) != set(space.spaces):
                raise ValueError(f"an object with {', '.join(map(str, space.spaces))} is needed")
            return {key: of_json(each, value[key]) for key, each in space.spaces.items()}
        case "Tuple":
            return tuple(of_json(each, part) for each, part in zip(space.spaces, value, strict=True))
        case "Discrete":
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{value!r} is no whole number")
            return value
        case "Text":
            return value
        case _:
            import numpy

            array = numpy.asarray(value, dtype=numpy.float64)
            if array.ndim == 0 and tuple(space.shape) == (1,):
                array = array.reshape(1)
            if array.shape != tuple(space.shape):
                raise ValueError(f"numbers of shape {tuple(space.shape)} are needed, not {array.shape}")
            typed = array.astype(space.dtype)
            if not numpy.issubdtype(typed.dtype, numpy.floating) and (typed != array).any():
                raise ValueError("whole numbers are needed")
            return typed
