"""What ends an episode that does not end by itself."""

from dataclasses import dataclass

from opentinker.errors import invalid


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an episode that does not end by itself. None: no such limit."""

    turns: int | None = None
    """Sampled actions; then TURN_LIMIT."""
    tokens_per_episode: int | None = None
    """Prompts, actions and replies together; then TOKEN_LIMIT."""
    wall_clock_s: float | None = None
    """Then EPISODE_TIMEOUT, which never counts against the model."""

    def __post_init__(self) -> None:
        for name in ("turns", "tokens_per_episode", "wall_clock_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise invalid(name, f"must be above 0, not {value}")
