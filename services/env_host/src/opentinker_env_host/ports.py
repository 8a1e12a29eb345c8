"""What the rules of env_host need from outside: workers, a clock, a place to announce failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentinker_env_host.domain.episode import Episode
    from opentinker_env_host.domain.packages import Package

Plain = Mapping[str, Any]
"""A JSON object; images and arrays in it are indices into the byte strings beside it."""


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """What an environment says about itself, as its worker reports it."""

    description: str
    version: str
    max_turns: int
    deterministic: bool
    splits: tuple[str, ...]
    agents: tuple[str, ...] = ("agent",)
    tools: tuple[Plain, ...] = ()
    run_timeout_s: float = 0.0
    """Above 0 where the environment owns the model loop."""
    snapshots: str = "NONE"
    """NATIVE, COPY, REPLAY or NONE: what is tried first."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer. `digest` is a hash of what the agent sees; `env_s` the time inside the
    environment.
    """

    answer: Plain
    blobs: Sequence[bytes]
    digest: str
    env_s: float


class WorkerError(Exception):
    """Base of what a call to a worker can end with instead of a reply."""


class EnvironmentRaised(WorkerError):
    """The environment's code raised; the worker lives on."""


class OptionsRefused(WorkerError):
    """The environment does not take these options."""


class WorkerTimedOut(WorkerError):
    """The call passed its deadline; the worker was killed for it."""


class WorkerLost(WorkerError):
    """The worker died. `suspect`: this call was running then, so that it may be the cause."""

    def __init__(self, text: str, *, suspect: bool) -> None:
        super().__init__(text)
        self.suspect = suspect


class WorkerUnusable(WorkerError):
    """The worker could not import its environment; the text says why."""


class NoWorkerFree(WorkerError):
    """Every worker that may exist is taken by another episode."""


class Worker(Protocol):
    """One worker process."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    @property
    def facts(self) -> EnvironmentFacts:
        """What it reported when it started."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it still takes calls."""
        ...

    async def call(self, operation: str, timeout_s: float, **fields: Any) -> Reply:
        """One call. `timeout_s` counts from when the worker gets to it. Raises a WorkerError."""
        ...

    def kill(self, why: str) -> None:
        """End it now, with everything it started."""
        ...

    async def wait(self) -> str:
        """Return when it has ended; how it ended."""
        ...

    def resident_bytes(self) -> int:
        """Memory it holds; 0 when it is gone."""
        ...


class WorkerLauncher(Protocol):
    """Starts workers of one environment."""

    async def start(self) -> Worker:
        """A worker that has imported its environment. WorkerUnusable if it cannot."""
        ...


class Journal(Protocol):
    """Keeps what a host that is started again needs to play its episodes again: what it was told is kept once
    `flush` has returned.
    """

    def load(self) -> "list[Episode]":
        """What was open; expired until renewed."""
        ...

    def opened(self, episodes: "Sequence[Episode]") -> None:
        """Episodes were opened."""
        ...

    def begun(self, episode: "Episode") -> None:
        """The first observation was given."""
        ...

    def moved(self, episode: "Episode") -> None:
        """The episode is now as it says, whatever was told of it before."""
        ...

    def stepped(self, episode: "Episode") -> None:
        """A step was answered."""
        ...

    def closed(self, name: str) -> None:
        """An episode is over."""
        ...

    def flush(self) -> None:
        """Comes before each answer."""
        ...

    def tidy(self, episodes: "Sequence[Episode]") -> None:
        """Now and then: these are all that are open."""
        ...

    def close(self) -> None:
        """The host stops."""
        ...


class NoJournal:
    """Keeps nothing: who starts again has no episodes."""

    def load(self) -> "list[Episode]":
        return []

    def opened(self, episodes: "Sequence[Episode]") -> None:
        return None

    def begun(self, episode: "Episode") -> None:
        return None

    def moved(self, episode: "Episode") -> None:
        return None

    def stepped(self, episode: "Episode") -> None:
        return None

    def closed(self, name: str) -> None:
        return None

    def flush(self) -> None:
        return None

    def tidy(self, episodes: "Sequence[Episode]") -> None:
        return None

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """How workers can run untrusted code: the mode's name, empty where they cannot and `error` says why."""

    mode: str = ""
    version: str = ""
    error: str = ""


class Sandbox(Protocol):
    """Knows what jails there can be."""

    async def facts(self) -> SandboxFacts:
        """What there is; never raises."""
        ...


class BuildFailed(Exception):
    """What a package needs cannot be installed. `requirement` names what, where that is known."""

    def __init__(self, text: str, requirement: str = "") -> None:
        super().__init__(text)
        self.requirement = requirement


class Packages(Protocol):
    """Keeps uploaded packages. Calls block; each returns when it is kept."""

    def load(self) -> "list[Package]":
        """All versions of all projects."""
        ...

    def add(self, package: "Package", archive: bytes) -> None:
        """Keep a new version under the next number, which the package is given."""
        ...

    def keep_result(self, package: "Package") -> None:
        """Keep what became of it."""
        ...

    def archive(self, package: "Package") -> bytes:
        """What was uploaded."""
        ...

    def remove(self, package: "Package") -> None:
        """Forget a version."""
        ...


class Workshop(Protocol):
    """Builds what packages run in, starts their workers, and probes environments."""

    async def python(self) -> str:
        """The version of Python that packages run on. MISSING_DEPENDENCY where there can be no jail."""
        ...

    async def check(self, archive: bytes) -> None:
        """ServiceError INVALID_FIELD for an archive that is not taken."""
        ...

    async def build(self, package: "Package", archive: bytes) -> None:
        """Make what its workers need. BuildFailed."""
        ...

    def is_built(self, package: "Package") -> bool:
        """Whether what its workers need is there, once `python` was asked for."""
        ...

    def launcher(self, package: "Package") -> WorkerLauncher:
        """Starts its workers, once it is built."""
        ...

    def logs(self, package: "Package", tail_bytes: int) -> tuple[str, list[tuple[str, str]]]:
        """The ends of what its build and its workers wrote. Blocks."""
        ...

    def remove(self, package: "Package", others: "Sequence[Package]") -> None:
        """Delete what none of the others needs. Blocks."""
        ...


class Prober(Protocol):
    """Measures environments."""

    async def probe(self, environment: "str | Package", request: Plain) -> Plain:
        """The report of a probe, in processes of its own. ServiceError INVALID_FIELD, ENV_CRASHED,
        STEP_TIMEOUT.
        """
        ...


class FailureSink(Protocol):
    """Where it is announced that infrastructure ended an episode."""

    async def episode_failed(self, episode: str, environment: str, reason: str) -> None:
        """Announce it; never blocks for long and never raises."""
        ...
