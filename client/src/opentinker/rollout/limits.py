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
    tool_calls: int | None = None
    """Tool calls; the one after that ends it with TOOL_LIMIT."""
    parse_errors: int | None = 10
    """Tool calls that cannot be read, each told to the model; the one after that ends it with
    PARSE_ERROR_LIMIT.
    """
    illegal_actions: int | None = None
    """Actions that are none of those an observation lists, each told to the model, which tries again; the one
    after that ends it with PARSE_ERROR_LIMIT. None: the environment gets them as they are.
    """
    wall_clock_s: float | None = None
    """Then EPISODE_TIMEOUT, which never counts against the model."""

    def __post_init__(self) -> None:
        for name in ("turns", "tokens_per_episode", "wall_clock_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise invalid(name, f"must be above 0, not {value}")
        for name in ("tool_calls", "parse_errors", "illegal_actions"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise invalid(name, f"must be at least 0, not {value}")
