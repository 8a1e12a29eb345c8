"""What a server that the scheduler starts is told, on this host or on another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.settings import SchedulerSettings


def server_settings(
    settings: SchedulerSettings, scheduler_address: str, server: Server, folder: Path
) -> Mapping[str, Any]:
    """What a launched server is told: how to reach everything, what to be. Unset fields are left out."""
    options = server.options
    shared = settings.model_dump(
        mode="json",
        include={
            "listen_host",
            "tls",
            "peer_tls",
            "service_key_file",
            "bootstrap_key_file",
            "nats_url",
            "nats_token_file",
            "s3",
            "scheduler_address_file",
            "lifeline_fd",
            "log_level",
            "traces_endpoint",
            "traces_file",
            "model_roots",
            "model_cache_dir",
            "allow_any_model_dir",
        },
    )
    own: dict[str, Any] = {
        # Of several schedulers the operator names all, so that a server finds the one that leads.
        "scheduler_address": settings.scheduler_address or scheduler_address,
        "state_dir": str(folder),
        "server_id": server.id,
        "slots": server.slots_total,
        "base_model": server.base_model,
        "engine": options.engine,
        "dtype": options.dtype,
        "serving_mode": options.serving_mode,
        "max_lora_rank": options.max_lora_rank,
        "context_tokens": options.context_tokens,
        "accelerator": options.accelerator,
    }
    if settings.service_key_file and settings.bootstrap_key_file:
        own["require_job_tokens"] = True
    if options.ranks > 1:
        own["ranks"] = options.ranks
    if options.engine == "torch" and server.devices:
        own["device"] = "cuda"
    extra = settings.server_settings.get(server.role, {})
    merged = {**shared, **own, **extra}
    return {key: value for key, value in merged.items() if value not in (None, "")}


HERE_ONLY = ("lifeline_fd", "scheduler_address_file", "traces_file")
"""Settings that mean nothing on another host."""


def node_settings(
    settings: SchedulerSettings, scheduler_address: str, server: Server
) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
    """The settings of a server on another host, and the files of this one that it needs there, by name.

    `{folder}` and `{address}` stand for what that host will know. What the operator sets in `server_settings`
    is meant for that host, and stays as it is.
    """
    told = dict(server_settings(settings, scheduler_address, server, Path("{folder}")))
    extra = settings.server_settings.get(server.role, {})
    files: dict[str, Path] = {}
    for name in HERE_ONLY:
        if name not in extra:
            told.pop(name, None)
    if "listen_host" not in extra:
        told["listen_host"] = "{address}"
    if server.options.engine == "torch" and settings.engine_gpus.get("torch") and "device" not in extra:
        # Also where nodes are added, and so nobody knows beforehand which GPUs it gets.
        told["device"] = "cuda"
    return {
        name: value if name in extra else _shipped(name, value, files) for name, value in told.items()
    }, files


def _shipped(name: str, value: Any, files: dict[str, Path]) -> Any:
    """A setting with the files that it names taken along."""
    if isinstance(value, Mapping):
        return {key: _shipped(f"{name}.{key}", item, files) for key, item in value.items()}
    if name.endswith("_file") and isinstance(value, str) and value:
        files[name] = Path(value)
        return "{folder}/" + name
    return value
