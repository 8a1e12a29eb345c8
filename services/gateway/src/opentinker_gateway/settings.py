"""What the gateway can be told."""

from pydantic import Field

from opentinker_kit.settings import ServerSettings


class GatewaySettings(ServerSettings):
    """OpenTinker gateway: OpenAI's HTTP API over the models of a cluster."""

    listen_fd: int | None = None
    """A socket that listens already, inherited; the supervisor of an embedded stack starts the gateway at the
    first connection to it.
    """
    max_body_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Of a request."""
    max_requests: int = Field(default=1024, ge=1)
    """Answered at once; more are refused with 429."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """A client that reads nothing of a stream for so long is left."""
    model_start_s: float = Field(default=300.0, gt=0)
    """How long a request waits for its model to be served before it is told to come back."""
    on_demand_jobs: int = Field(default=8, ge=0)
    """Models that nothing serves and that are asked for by name get an inference job, so many at once."""
    on_demand_idle_s: float = Field(default=300.0, gt=0)
    """Such a job ends when nobody asked for so long."""
    max_episodes: int = Field(default=4096, ge=0)
    """Recorded at once."""
    episode_idle_s: float = Field(default=3600.0, gt=0)
    """An episode without a call for so long is forgotten."""
    max_episode_tokens: int = Field(default=1 << 20, ge=1)
    """Recorded in one episode."""
    max_episode_calls: int = Field(default=10_000, ge=1)
    max_recorded_tokens: int = Field(default=1 << 26, ge=1)
    """Recorded in all episodes; beyond it no new one is taken."""
