"""The live table on a terminal, one line a step elsewhere; and the warnings a person should not miss."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker.connection.notices import wanted

CLIPPED = 0.9
CLIPPED_STEPS = 3
ROWS = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: a metric and the format of its number."""

    title: str
    metric: str
    form: str


REINFORCEMENT = (
    Column("reward", "critic/score/mean", ".3f"),
    Column("loss", "actor/pg_loss", "+.4f"),
    Column("KL", "actor/ppo_kl", "+.5f"),
    Column("grad norm", "actor/grad_norm", ".3f"),
    Column("tokens/s", "perf/throughput", ",.0f"),
    Column("s/step", "timing_s/step", ".1f"),
)


class Evaluated(Protocol):
    """What an evaluation came to."""

    @property
    def summary(self) -> str:
        """In a few words."""
        ...

    def metrics(self) -> dict[str, float]:
        """As metrics."""
        ...


class Progress(Protocol):
    """What a run tells a person."""

    def start(self) -> None: ...

    def expect(self, steps: int) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, result: Evaluated) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Nobody looks."""

    def start(self) -> None:
        pass

    def expect(self, steps: int) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def evaluated(self, step: int, result: Evaluated) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class Table:
    """Metrics and ETA of the last steps, redrawn in place on a terminal, else appended."""

    def __init__(self, steps: int, title: str, columns: Sequence[Column]) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, markup=False)
        self._steps = steps
        self._columns = columns
        self._title = title
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._live: Any = None
        self._seconds: deque[float] = deque(maxlen=ROWS)
        self._headed = False

    def start(self) -> None:
        """Begin to draw."""
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def expect(self, steps: int) -> None:
        """How many steps there will be."""
        self._steps = steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        self._seconds.append(metrics.get("timing_s/step", 0.0))
        left = sum(self._seconds) / len(self._seconds) * (self._steps - step)
        row = (
            f"{step}/{self._steps}",
            *(_number(metrics.get(column.metric), column.form) for column in self._columns),
            f"{int(left // 60)}:{int(left % 60):02d}",
        )
        self._add(row)

    def evaluated(self, step: int, result: Evaluated) -> None:
        """An evaluation has ended."""
        self.note(f"evaluation at step {step}: {result.summary}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    @property
    def _names(self) -> list[str]:
        return ["step", *(column.title for column in self._columns), "ETA"]

    def _add(self, row: tuple[str, ...]) -> None:
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._render())
            return
        if not self._headed:
            self._headed = True
            self._console.print(" ".join(f"{name:>9}" for name in self._names), soft_wrap=True)
        self._console.print(" ".join(f"{cell:>9}" for cell in row), soft_wrap=True)

    def _render(self) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(title=self._title, title_justify="left")
        for name in self._names:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


class ClipWatch:
    """Warns once when nearly every reply runs into the token limit: such a model cannot be rewarded for an
    answer.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._warned = False

    def check(self, ratio: float, limit: int | None) -> str | None:
        """The warning, when it is due."""
        self._steps = self._steps + 1 if ratio >= CLIPPED else 0
        if self._warned or self._steps < CLIPPED_STEPS:
            return None
        self._warned = True
        allowed = f"max_tokens={limit}" if limit is not None else "the model's context"
        text = (
            f"response/clip_ratio was {ratio:.2f} for {CLIPPED_STEPS} steps: nearly every reply is cut "
            f"off at {allowed} before the model ends it. Raise max_tokens, or check that the prompt "
            f"tells the model to stop."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return text


def progress(
    wish: bool | None, steps: int, title: str, columns: Sequence[Column] = REINFORCEMENT
) -> Progress:
    """A table where somebody looks (a terminal, or `wish`), nothing elsewhere."""
    return Table(steps, title, columns) if wanted(wish) else Silent()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
