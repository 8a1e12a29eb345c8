"""What env_host can be told."""

import re
import sys
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opentinker_kit.settings import ServerSettings

_ID = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?")


class EnvironmentSettings(BaseModel):
    """One environment to host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    """`module:Class`, or `module:function(literals)` that makes one; importable by the worker's
    interpreter, the host never imports it.
    """
    path: tuple[Path, ...] = ()
    """Folders put in front of the worker's module search path."""
    python: Path | None = None
    """The worker's interpreter, of a virtual environment with `opentinker` and the package; by default ours.
    """
    exclusive: bool = False
    """One episode per worker process, for libraries whose randomness is global to the process."""
    threads: int | None = Field(default=None, ge=1, le=256)
    """Most threads of a shared worker that play. A plain environment (by default 64) gets a further one only
    where a step blocks; 1 is for libraries that are not safe for threads. An `async` one (by default 1) gets
    an event loop in each; more than 1 is for methods that block, and splits what episodes share on a loop.
    """

    @model_validator(mode="after")
    def _one_step_at_a_time(self) -> Self:
        if self.exclusive and self.threads is not None:
            raise ValueError("threads: an exclusive worker has one episode, and so one step at a time")
        return self


class PackageSettings(BaseModel):
    """Environments that users upload."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """Take uploads. They need jails: without bubblewrap each is refused."""
    build_dir: Path | None = None
    """Where virtual environments lie, in a folder that jailed users can reach; by default below `state_dir`,
    or in /var/tmp where the host runs as root. It may be lost: what is needed is built again.
    """
    network: bool = False
    """Give pip the network while it installs requirements. Workers have none."""
    index_url: str = ""
    """The package index that pip asks, with `network`; by default its own."""
    wheels: Path | None = None
    """A folder of wheels, readable for everybody, that pip looks into."""
    archive_bytes: int = Field(default=8 << 20, ge=1024, le=15 << 20)
    """Largest upload."""
    unpacked_bytes: int = Field(default=64 << 20, ge=1024)
    files: int = Field(default=4096, ge=1)
    """What an upload may unpack to."""
    max_project_versions: int = Field(default=100, ge=1)
    max_project_bytes: int = Field(default=256 << 20, ge=1024)
    """What a project may keep."""
    max_workers: int = Field(default=2, ge=1, le=256)
    """Worker processes of one version; of an exclusive one `max_exclusive_workers`."""
    idle_s: float = Field(default=300.0, gt=0)
    """Workers of a version without episodes are ended after so long."""
    memory_bytes: int = Field(default=4 << 30, ge=256 << 20)
    """Address space of each process of a build or a worker."""
    processes: int = Field(default=128, ge=8)
    """Processes and threads of a build or a worker."""
    venv_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Largest virtual environment."""
    worker_file_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Largest file of a worker, its log among them."""
    build_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _index_needs_network(self) -> Self:
        if self.index_url and not self.network:
            raise ValueError("index_url: without network nothing is asked; set network, or use wheels")
        return self


def _shipped() -> dict[str, EnvironmentSettings]:
    module = "opentinker.environments.builtin"
    return {
        "arithmetic": EnvironmentSettings(target=f"{module}:Arithmetic"),
        "guess_number": EnvironmentSettings(target=f"{module}:GuessNumber"),
    }


class EnvHostSettings(ServerSettings):
    """Settings of env_host."""

    environments: dict[str, EnvironmentSettings] = Field(default_factory=_shipped)
    """What is hosted, by name."""
    warm_workers: int = Field(default=1, ge=0, le=64)
    """Idle workers kept ready for each environment."""
    max_workers: int = Field(default=4, ge=1, le=256)
    """Worker processes of one environment that share episodes."""
    max_exclusive_workers: int = Field(default=32, ge=1, le=1024)
    """Worker processes of one exclusive environment; further episodes wait for one."""
    episodes_per_worker: int = Field(default=32, ge=1)
    """Episodes on a shared worker before another is started."""
    worker_wait_s: float = Field(default=60.0, gt=0)
    """How long an episode waits for a free worker before it is told to come back."""
    recycle_episodes: int = Field(default=10_000, ge=1)
    """Episodes after which a worker is replaced."""
    recycle_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Resident memory from which on a worker is replaced once its episodes are over."""
    worker_memory_bytes: int = Field(default=4 << 30, ge=256 << 20)
    """What one worker process may allocate, and each process that it starts. The episode that asks for more
    ends as ENV_CRASH.
    """
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long a worker may take to import its environment."""
    max_episodes: int = Field(default=8192, ge=1)
    """Open episodes in all."""
    max_project_episodes: int | None = Field(default=None, ge=1)
    """Open episodes of one project, where calls are made for jobs (`require_job_tokens`)."""
    max_group_size: int = Field(default=1024, ge=1)
    journal_steps: int = Field(default=2000, ge=0)
    """Longest episode that can be played again after the death of its worker."""
    packages: PackageSettings = PackageSettings()
    probe_timeout_s: float = Field(default=120.0, gt=0)
    """How long a probe may take."""

    @property
    def default_python(self) -> Path:
        """The interpreter of workers that name none."""
        return Path(sys.executable)

    @model_validator(mode="after")
    def _names(self) -> Self:
        if self.max_project_episodes is not None and not self.require_job_tokens:
            raise ValueError("max_project_episodes: without require_job_tokens no call names a project")
        for name in self.environments:
            if not _ID.fullmatch(name):
                raise ValueError(f"environment name {name!r}: lower-case letters, digits, and _ . - inside")
        return self
