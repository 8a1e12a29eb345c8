"""What code in a jail may use, and what came of running it."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum

MIB = 1 << 20


class Ended(StrEnum):
    """How a piece of jailed code ended."""

    EXITED = "EXITED"
    """By itself; `exit` is its status."""
    SIGNALLED = "SIGNALLED"
    """A signal ended it; `exit` is 128 and the signal's number."""
    TIMEOUT = "TIMEOUT"
    """Its wall clock ran out."""
    CPU_LIMIT = "CPU_LIMIT"
    """Its CPU time ran out."""
    MEMORY_LIMIT = "MEMORY_LIMIT"
    """All its processes together held too much memory."""
    PROCESS_LIMIT = "PROCESS_LIMIT"
    """It had more processes than the kernel should have let it have."""
    FILE_LIMIT = "FILE_LIMIT"
    """It made too many files."""
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    """It wrote too much to its standard output or error."""
    LOST = "LOST"
    """The jail went away without a word: killed from outside, or broken by the code in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What jailed code may use. A single allocation over `memory_bytes` fails inside as a MemoryError; where
    all processes together hold more, they are killed.
    """

    wall_s: float = 10.0
    """Wall clock of a run, or of one exec of an interpreter."""
    cpu_s: float = 10.0
    """CPU time of each process, rounded up to whole seconds; of an interpreter, of one exec."""
    memory_bytes: int = 512 * MIB
    """Address space of each process, and resident memory of all together."""
    processes: int = 32
    """Processes and threads at once."""
    disk_bytes: int = 64 * MIB
    """Size of the working folder, of /dev/shm, and of any one file. Held in memory."""
    files: int = 4096
    """Files in the working folder and in /dev/shm together."""
    open_files: int = 128
    """Open files of each process."""
    output_bytes: int = 1 * MIB
    """What may be written to standard output and error together, of an interpreter by one exec."""

    def __post_init__(self) -> None:
        least = {"processes": 2, "memory_bytes": 64 * MIB, "disk_bytes": 4096, "files": 16, "open_files": 16}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not (type(value) is int and value >= least.get(field.name, 1)):
                raise ValueError(
                    f"{field.name} must be an integer of at least {least.get(field.name, 1)}, not {value!r}"
                )
            if field.type is float and not (_is_number(value) and 0 < value <= 86_400):
                raise ValueError(f"{field.name} must be more than 0 and at most 86400, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run. Bytes that are no UTF-8 are replaced in `stdout` and `stderr`.

    All of it but `wall_s` and an `ended` of TIMEOUT, OUTPUT_LIMIT or LOST was said inside, where untrusted
    code runs: it is data, never a verdict.
    """

    stdout: str
    stderr: str
    exit: int | None
    """The exit status, 128 and more after a signal; None where it was killed."""
    ended: Ended
    wall_s: float
    cpu_s: float
    """CPU time of its processes that ended before it was killed, if it was; of an exec, what its interpreter
    says of itself.
    """
    peak_bytes: int
    """Most resident memory of its largest process, as the jail's first process saw it; 0: unknown."""

    @property
    def ok(self) -> bool:
        """It ended by itself with status 0."""
        return self.ended is Ended.EXITED and self.exit == 0
