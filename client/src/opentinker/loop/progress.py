"""The live table on a terminal, one line a step elsewhere; and the warnings a person should not miss."""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from opentinker.connection.notices import wanted

if TYPE_CHECKING:
    from opentinker.loop.evaluation import EvaluationResult

CLIPPED = 0.9
CLIPPED_STEPS = 3
ROWS = 12


class Progress(Protocol):
    """What fit() tells a person."""

    def start(self) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, result: "EvaluationResult") -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Nobody looks."""

    def start(self) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def evaluated(self, step: int, result: "EvaluationResult") -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class Table:
    """Reward, loss, KL, tokens/s and ETA of the last steps, redrawn in place on a terminal, else appended."""

    def __init__(self, steps: int, title: str) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, markup=False)
        self._steps = steps
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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        self._seconds.append(metrics.get("timing_s/step", 0.0))
        left = sum(self._seconds) / len(self._seconds) * (self._steps - step)
        row = (
            f"{step}/{self._steps}",
            _number(metrics.get("critic/score/mean"), ".3f"),
            _number(metrics.get("actor/pg_loss"), "+.4f"),
            _number(metrics.get("actor/ppo_kl"), "+.5f"),
            _number(metrics.get("actor/grad_norm"), ".3f"),
            _number(metrics.get("perf/throughput"), ",.0f"),
            _number(metrics.get("timing_s/step"), ".1f"),
            f"{int(left // 60)}:{int(left % 60):02d}",
        )
        self._add(row)

    def evaluated(self, step: int, result: "EvaluationResult") -> None:
        """An evaluation has ended."""
        self.note(
            f"evaluation at step {step}: reward {result.reward:.3f} "
            f"[{result.low:.3f}, {result.high:.3f}] over {result.tasks} tasks"
        )

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    def _add(self, row: tuple[str, ...]) -> None:
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._render())
            return
        if not self._headed:
            self._headed = True
            self._console.print(" ".join(f"{name:>9}" for name in COLUMNS), soft_wrap=True)
        self._console.print(" ".join(f"{cell:>9}" for cell in row), soft_wrap=True)

    def _render(self) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(title=self._title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


COLUMNS = ("step", "reward", "loss", "KL", "grad norm", "tokens/s", "s/step", "ETA")


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


def progress(wish: bool | None, steps: int, title: str) -> Progress:
    """A table where somebody looks (a terminal, or `wish`), nothing elsewhere."""
    return Table(steps, title) if wanted(wish) else Silent()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
