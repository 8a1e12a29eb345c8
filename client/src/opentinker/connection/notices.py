"""What a person who waits should know, on stderr: one line that changes on a terminal, nothing where nobody
looks.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

Say = Callable[[str], None]


def wanted(progress: bool | None) -> bool:
    """Whether to show progress: as asked, otherwise on a terminal. OPENTINKER_PROGRESS=0 or 1 decides for
    all.
    """
    named = os.environ.get("OPENTINKER_PROGRESS")
    if progress is None and named in ("0", "1"):
        return named == "1"
    return sys.stderr.isatty() if progress is None else progress


@contextlib.contextmanager
def notices(progress: bool | None) -> Iterator[Say]:
    """A function that shows a line while the block runs."""
    if not wanted(progress):
        yield lambda text: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("connecting") as status:
        yield lambda text: status.update(text)


def watcher(progress: bool | None) -> Say | None:
    """A function that prints each state of a job as a line of its own; None where nobody looks."""
    if not wanted(progress):
        return None
    console: Any = None

    def say(text: str) -> None:
        nonlocal console
        if console is None:
            from rich.console import Console

            console = Console(stderr=True, highlight=False, markup=False)
        console.print(f"job {text}", style="dim", soft_wrap=True)

    return say
