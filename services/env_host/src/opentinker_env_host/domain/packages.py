"""What an uploaded package may look like: names, requirements, versions of Python, quotas.

An environment of a project has versions `NAME@1`, `NAME@2` and so on. A version never changes. Inside the
host it is known by its key, `PROJECT/NAME@N`, which no environment of the settings can have.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from opentinker_env_host.ports import EnvironmentFacts
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

MAX_REQUIREMENTS = 100
_ID = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?")
_WORD = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_TARGET = re.compile(rf"{_WORD}(\.{_WORD}){{0,15}}:{_WORD}(\.{_WORD}){{0,3}}")
_CLAUSE = r"(===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.!+*_-]{1,64}"
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
    r"(\s*\[[A-Za-z0-9._, -]{1,200}\])?"
    rf"(\s*{_CLAUSE}(\s*,\s*{_CLAUSE}){{0,9}})?"
    r"(\s*;[A-Za-z0-9_.'\" <>=!()~-]{1,200})?"
)
_PYTHON_CLAUSE = re.compile(r"(>=|<=|==|!=|~=|>|<)\s*(\d{1,3}(?:\.\d{1,4}){0,2})(\.\*)?")
_WHEEL = re.compile(
    r"[A-Za-z0-9_.]{1,80}-[A-Za-z0-9_.!+]{1,60}(-\d[A-Za-z0-9_.]*)?(-[A-Za-z0-9_.]{1,80}){3}\.whl"
)


class PackageState(StrEnum):
    """Where a version is between its upload and its first episode."""

    BUILDING = "BUILDING"
    READY = "READY"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class PackageSpec:
    """What a package is made of."""

    target: str
    requirements: tuple[str, ...] = ()
    requires_python: str = ""
    wheel: str = ""
    """The wheel's file name; empty: source files."""
    exclusive: bool = False

    def as_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "target": self.target,
            "requirements": list(self.requirements),
            "requires_python": self.requires_python,
            "wheel": self.wheel,
            "exclusive": self.exclusive,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PackageSpec":
        """As it was kept."""
        return cls(**{**value, "requirements": tuple(value["requirements"])})


@dataclass(slots=True)
class Package:
    """A version: what was uploaded, and what became of it."""

    project: str
    name: str
    number: int
    spec: PackageSpec
    sha256: str
    size: int
    create_time: datetime
    request_id: str = ""
    state: PackageState = PackageState.BUILDING
    error: str = ""
    warnings: tuple[str, ...] = ()
    facts: EnvironmentFacts | None = None
    deleted: bool = field(default=False)

    @property
    def version(self) -> str:
        """`NAME@N`."""
        return f"{self.name}@{self.number}"

    @property
    def key(self) -> str:
        """What the host knows it by."""
        return key_of(self.project, self.version)


def key_of(project: str, version: str) -> str:
    """The key of a version of a project."""
    return f"{project}/{version}"


def is_key(environment: str) -> bool:
    """Whether it is the key of a package, and not the name of an environment of the settings."""
    return "/" in environment


def parse_name(name: str, field: str) -> tuple[str, int | None]:
    """NAME and N of `NAME@N`; None where only the name is given. ServiceError INVALID_FIELD."""
    base, at, number = name.partition("@")
    if not _ID.fullmatch(base) or (at and not (number.isascii() and number.isdigit() and len(number) < 10)):
        text = f"{name[:80]!r} is no name of an environment: NAME or NAME@VERSION"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)
    return base, int(number) if at else None


def check_spec(spec: PackageSpec, python: str) -> None:
    """ServiceError INVALID_FIELD, naming the field. `python` is the version that packages run on here."""
    if not _TARGET.fullmatch(spec.target):
        raise _invalid("spec.target", f"{spec.target[:80]!r} does not name a class as module:Class")
    if len(spec.requirements) > MAX_REQUIREMENTS:
        raise _invalid("spec.requirements", f"there are {len(spec.requirements)}; at most {MAX_REQUIREMENTS}")
    for index, requirement in enumerate(spec.requirements):
        if not _REQUIREMENT.fullmatch(requirement):
            raise _invalid(
                f"spec.requirements[{index}]",
                f"{requirement[:80]!r} is no name with versions: options, addresses and paths are not taken",
            )
    if spec.wheel and not _WHEEL.fullmatch(spec.wheel):
        raise _invalid("spec.wheel", f"{spec.wheel[:80]!r} is no file name of a wheel")
    if not fits_python(spec.requires_python, python):
        text = f"it needs Python {spec.requires_python}, and packages run on {python} here"
        raise _invalid("spec.requires_python", text)


def fits_python(wanted: str, python: str) -> bool:
    """Whether a version of Python is one of those that a package runs on. ServiceError INVALID_FIELD."""
    have = _numbers(python)
    for clause in filter(None, (part.strip() for part in wanted.split(","))):
        match = _PYTHON_CLAUSE.fullmatch(clause)
        if match is None or (match[3] and match[1] not in ("==", "!=")):
            raise _invalid("spec.requires_python", f"{clause[:40]!r} is no range of versions as >=3.11")
        operator, number, prefix = match[1], _numbers(match[2]), bool(match[3])
        if not _holds(operator, have, number, prefix):
            return False
    return True


def _holds(operator: str, have: Sequence[int], number: Sequence[int], prefix: bool) -> bool:
    same = list(have[: len(number)]) == list(number)
    width = max(len(have), len(number))
    left, right = [*have, *[0] * (width - len(have))], [*number, *[0] * (width - len(number))]
    match operator:
        case "==":
            return same if prefix else left == right
        case "!=":
            return not same if prefix else left != right
        case "~=":
            return left >= right and list(have[: len(number) - 1]) == list(number[:-1])
        case ">=":
            return left >= right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left < right


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _invalid(field: str, text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_FIELD, text, field=field)
