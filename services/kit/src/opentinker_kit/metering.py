"""How many tokens a server worked on for which job: what usage is counted from."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Tokens:
    """Since the server started."""

    trained: int = 0
    sampled: int = 0


class TokenMeter:
    """Counts by job, `jobs/{job}`. From the event loop.

    Work that no job is known for is not counted: a server without a scheduler has nobody to tell.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Tokens] = {}
        self._changed: set[str] = set()

    def trained(self, job: str, tokens: int) -> None:
        """A Forward or ForwardBackward over so many tokens ended."""
        self._add(job, Tokens(trained=tokens))

    def sampled(self, job: str, tokens: int) -> None:
        """A completion of so many tokens ended."""
        self._add(job, Tokens(sampled=tokens))

    def changed(self, *, everything: bool = False) -> Iterator[tuple[str, Tokens]]:
        """Counts that changed since this was last asked, or all."""
        names = list(self._jobs) if everything else sorted(self._changed)
        self._changed.clear()
        for job in names:
            yield job, self._jobs[job]

    def _add(self, job: str, more: Tokens) -> None:
        if not job:
            return
        counts = self._jobs.setdefault(job, Tokens())
        counts.trained += more.trained
        counts.sampled += more.sampled
        self._changed.add(job)
