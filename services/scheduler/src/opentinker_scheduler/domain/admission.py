"""What a job may ask for. Everything that can never work is refused here, by the name of the field."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.limits import Key, Limits
from opentinker_scheduler.domain.model import (
    DTYPES,
    ENGINES,
    SERVING_MODES,
    Cost,
    JobKind,
    OnClientLoss,
    Role,
    Server,
    ServerOptions,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.domain.nodes import Node, Pool, accelerators
from opentinker_scheduler.domain.shares import Rules
from opentinkerapi.runtime.reasons import Reason

MIN_LEASE_S, MAX_LEASE_S = 10.0, 24 * 3600.0
MAX_LABELS, MAX_TEXT = 64, 512
MAX_COUNT = 1024
MAX_PRIORITY = 100
MIN_DURATION_S, MIN_IDLE_S, MAX_DURATION_S = 1.0, 10.0, 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What this cluster can start, and with what unless a job says otherwise."""

    limits: Limits
    engines: Mapping[Role, tuple[str, ...]]
    """Engines that are installed here."""
    default_engines: Mapping[Role, str]
    install_hints: Mapping[str, str]
    """How to get an engine that is not installed."""
    default_dtypes: Mapping[str, str]
    """By engine."""
    default_serving_modes: Mapping[str, str]
    """By engine."""
    default_lora_rank: int = 32
    max_lora_rank: int = 256
    max_context_tokens: int = 8192

    def on(self, nodes: Sequence[Node]) -> "Offer":
        """With the nodes that servers are started on."""
        return replace(self, limits=replace(self.limits, nodes=tuple(nodes)))


@dataclass(frozen=True, slots=True)
class Model:
    """A base model that was resolved."""

    model_id: str
    context_tokens: int
    images: bool = False
    """Whether it sees images."""


IMAGE_ENGINES = ("transformers", "noop")
"""Inference engines that serve models that see images: vLLM's code for them needs torchvision."""


def check_job(
    kind: JobKind,
    slots: Sequence[SlotSpec],
    on_client_loss: OnClientLoss,
    lease_ttl_s: float,
    labels: Mapping[str, str],
) -> None:
    """Everything about a job but its models and servers. ServiceError names the field that is wrong."""
    if on_client_loss is OnClientLoss.DETACH and kind is not JobKind.INFERENCE:
        text = (
            f"on_client_loss DETACH is for INFERENCE jobs: a {kind.upper()} job does nothing without a driver"
        )
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="job.on_client_loss")
    if not MIN_LEASE_S <= lease_ttl_s <= MAX_LEASE_S:
        text = f"lease_ttl is {lease_ttl_s:g} s; it must be from {MIN_LEASE_S:g} s to {MAX_LEASE_S:g} s"
        raise ServiceError(Reason.INVALID_FIELD, text, field="job.lease_ttl")
    if len(labels) > MAX_LABELS or any(len(key) + len(value) > MAX_TEXT for key, value in labels.items()):
        text = f"at most {MAX_LABELS} labels of {MAX_TEXT} characters"
        raise ServiceError(Reason.INVALID_FIELD, text, field="job.labels")
    _check_kind(kind, slots)
    for index, spec in enumerate(slots):
        check_slot(spec, f"job.slots[{index}]")


def check_limits(kind: JobKind, priority: int, max_duration_s: float, idle_limit_s: float) -> None:
    """A job's own limits; 0 is none. ServiceError names the field that is wrong."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        text = f"priority is {priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ServiceError(Reason.INVALID_FIELD, text, field="job.priority")
    for name, seconds, least in (
        ("max_duration", max_duration_s, MIN_DURATION_S),
        ("idle_limit", idle_limit_s, MIN_IDLE_S),
    ):
        if seconds and not least <= seconds <= MAX_DURATION_S:
            text = f"{name} is {seconds:g} s; it must be from {least:g} s to {MAX_DURATION_S / 86400:g} days"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"job.{name}")
    if idle_limit_s and kind is JobKind.INFERENCE:
        text = "idle_limit is for jobs that train: an INFERENCE job makes no versions, checkpoints or metrics"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="job.idle_limit")


def check_quota(project: str, cost: Cost, priority: int, jobs: int, rules: Rules) -> None:
    """QUOTA_EXCEEDED for what a project may not have: not ever, or not beside `jobs` that have not ended."""

    def refuse(name: str, field: str, text: str) -> ServiceError:
        return ServiceError(Reason.QUOTA_EXCEEDED, text, field=field, quota=[(name, text)])

    if priority > rules.max_priority:
        text = f"priority is {priority}; the quota max_priority of project {project} is {rules.max_priority}"
        raise refuse("max_priority", "job.priority", text)
    if rules.max_jobs is not None and jobs >= rules.max_jobs:
        text = (
            f"project {project} has {jobs} jobs that have not ended; its quota max_jobs is {rules.max_jobs}"
        )
        raise refuse("max_jobs", "job", text)
    if rules.max_slots is not None and cost.slots > rules.max_slots:
        quota = f"the quota max_slots of project {project} is {rules.max_slots}"
        text = f"this job takes {cost.slots:g} slots; {quota}"
        raise refuse("max_slots", "job.slots", text)
    if rules.max_gpus is not None and cost.gpus > rules.max_gpus:
        quota = f"the quota max_gpus of project {project} is {rules.max_gpus:g}"
        text = f"this job takes {cost.gpus:g} GPUs; {quota}"
        raise refuse("max_gpus", "job.slots", text)


def _check_kind(kind: JobKind, slots: Sequence[SlotSpec]) -> None:
    trainers = [spec for spec in slots if spec.role is Role.TRAINER]
    if kind is JobKind.INFERENCE and trainers:
        text = "an INFERENCE job has inference slots only; to train use kind LORA_RL, FULL_RL or SFT"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="job.slots")
    if kind is not JobKind.INFERENCE and not trainers:
        text = f"a {kind.upper()} job needs a trainer slot; for sampling alone use kind INFERENCE"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="job.slots")
    full = trains_all_weights(slots)
    if full and kind is JobKind.LORA_RL:
        text = "a LORA_RL job has no trainer slot with tuning FULL; use kind FULL_RL"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="job.slots")
    if kind is JobKind.FULL_RL and not full:
        text = "a FULL_RL job needs a trainer slot with tuning FULL; for adapters use kind LORA_RL"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="job.slots")
    for index, spec in enumerate(slots):
        if full and spec.options.serving_mode == "adapter":
            text = "all weights of a policy are served merged; leave serving_mode unset"
            field = f"job.slots[{index}].options.serving_mode"
            raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field=field)


def trains_all_weights(slots: Sequence[SlotSpec]) -> bool:
    """Whether a job's policies are whole models: its servers are then its own, and serve one version."""
    return any(spec.tuning is Tuning.FULL for spec in slots)


def check_slot(spec: SlotSpec, field: str) -> None:
    """What one slot asks for by itself."""
    if not 1 <= spec.count <= MAX_COUNT:
        text = f"count is {spec.count}; it must be from 1 to {MAX_COUNT}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.count")
    if spec.role is Role.INFERENCE and spec.tuning is not Tuning.NONE:
        text = "tuning is for trainer slots; leave it unset for inference"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.tuning")
    options = spec.options
    _one_of(options.engine, ENGINES[spec.role], f"{field}.options.engine")
    _one_of(options.dtype, DTYPES, f"{field}.options.dtype")
    _one_of(options.serving_mode, SERVING_MODES, f"{field}.options.serving_mode")
    if spec.role is Role.TRAINER and options.serving_mode:
        text = "serving_mode is for inference slots"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.options.serving_mode")
    if spec.role is Role.INFERENCE and options.ranks:
        raise ServiceError(Reason.INVALID_FIELD, "ranks is for trainer slots", field=f"{field}.options.ranks")
    for name in ("max_lora_rank", "context_tokens", "ranks"):
        if getattr(options, name) < 0:
            raise ServiceError(
                Reason.INVALID_FIELD, f"{name} must be positive", field=f"{field}.options.{name}"
            )


def _one_of(value: str, allowed: Sequence[str], field: str) -> None:
    if value and value not in allowed:
        text = f"{value!r} is not known; allowed are {', '.join(allowed)}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)


def complete(spec: SlotSpec, model: Model, offer: Offer, field: str, *, full: bool = False) -> SlotSpec:
    """The spec with its model's id and every default filled in, so that equal wishes share servers.

    Without a launcher nothing is filled in but the model: a server that registered itself is taken as it is.
    `full`: the job trains all weights of a model. No other job then shares its servers: the trainer's memory
    is taken, and the inference server serves one version at a time.
    """
    is_inference = spec.role is Role.INFERENCE
    tuning = Tuning.NONE if is_inference else spec.tuning or Tuning.LORA
    if full:
        mode = "merged" if is_inference else ""
        options = replace(spec.options, serving_mode=mode)
        spec = replace(spec, exclusive=True, options=options)
    if not offer.limits.can_launch:
        return replace(spec, base_model=model.model_id, tuning=tuning)
    asked = spec.options
    engine = asked.engine or offer.default_engines[spec.role]
    if is_inference and model.images and engine not in IMAGE_ENGINES:
        if asked.engine:
            text = f"engine {engine} serves no model that sees images, as this one; use engine=transformers"
            raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field=f"{field}.options.engine")
        engine = IMAGE_ENGINES[0]
    if engine not in offer.engines[spec.role]:
        hint = offer.install_hints.get(engine, f"install the packages of engine {engine}")
        have = ", ".join(offer.engines[spec.role])
        text = f"engine {engine} is not installed where servers are started: {hint}; or use one of {have}"
        raise ServiceError(Reason.MISSING_DEPENDENCY, text, field=f"{field}.options.engine")
    rank = asked.max_lora_rank or offer.default_lora_rank
    if rank > offer.max_lora_rank:
        text = f"max_lora_rank {rank} is over this cluster's limit max_lora_rank={offer.max_lora_rank}"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=f"{field}.options.max_lora_rank")
    context = _context(asked.context_tokens, model, offer, f"{field}.options.context_tokens")
    accelerator = _accelerator(asked.accelerator, offer, f"{field}.options.accelerator")
    options = ServerOptions(
        engine=engine,
        dtype=asked.dtype or offer.default_dtypes.get(engine, ""),
        serving_mode=(asked.serving_mode or offer.default_serving_modes.get(engine, ""))
        if is_inference
        else "",
        max_lora_rank=rank,
        context_tokens=context,
        ranks=0 if is_inference else asked.ranks or 1,
        accelerator=accelerator,
    )
    return replace(spec, base_model=model.model_id, tuning=tuning, options=options)


def _context(asked: int, model: Model, offer: Offer, field: str) -> int:
    limit = offer.max_context_tokens
    if asked > limit:
        text = f"context_tokens {asked} is over this cluster's limit max_context_tokens={limit}"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
    if asked > model.context_tokens > 0:
        text = f"context_tokens {asked} is over the {model.context_tokens} tokens of {model.model_id}"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
    return asked or (min(limit, model.context_tokens) if model.context_tokens > 0 else limit)


def _accelerator(asked: str, offer: Offer, field: str) -> str:
    """The type that is asked for; where all nodes are of one type, that one."""
    nodes = offer.limits.nodes
    known = accelerators(nodes)
    if asked and asked not in known:
        have = f"there are {', '.join(known)}" if known else "the types of this cluster's nodes are not known"
        text = f"no node has accelerator {asked}; {have}"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
    return asked or (known[0] if len({node.accelerator for node in nodes}) == len(known) == 1 else "")


def check_offered(slots: Sequence[SlotSpec], servers: Sequence[Server]) -> None:
    """For servers that registered themselves: CANNOT_BE_SATISFIED where some of a slot's role and model are
    there and none of them has the options asked for. While there is none, the right one may still come."""
    for index, spec in enumerate(slots):
        of_model = [s for s in servers if s.role is spec.role and s.base_model == spec.base_model]
        if of_model and not any(server.options.accepts(spec.options) for server in of_model):
            offers = "; ".join(sorted({describe(server.options) for server in of_model}))
            which = f"{spec.role} server of {spec.base_model}"
            text = f"no {which} has {describe(spec.options)}; there are: {offers}"
            raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=f"job.slots[{index}].options")


def describe(options: ServerOptions) -> str:
    """The options that are set, for people."""
    values = asdict(options).items()
    return ", ".join(f"{name}={value}" for name, value in values if value) or "no options"


def check_capacity(
    slots: Sequence[SlotSpec], limits: Limits, *, who: str = "this job", field: str = "job.slots"
) -> None:
    """CANNOT_BE_SATISFIED, naming the limit, for what even an empty cluster could not place."""
    if not limits.can_launch:
        return
    needed = limits.servers_needed(slots)
    by_engine: dict[str, int] = {}
    for (_, _, options), servers in needed.items():
        by_engine[options.engine] = by_engine.get(options.engine, 0) + servers
    for engine, servers in by_engine.items():
        limit = limits.max_engine_servers.get(engine)
        if limit is not None and servers > limit:
            limit_name = f"max_engine_servers[{engine}]"
            text = f"{who} needs {servers} {engine} servers; the limit {limit_name} is {limit}"
            raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
    total = sum(by_engine.values())
    if total > limits.max_servers:
        text = f"{who} needs {total} servers; the limit max_servers is {limits.max_servers}"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
    _check_gpus(needed, limits, who, field)


def _check_gpus(needed: Mapping[Key, int], limits: Limits, who: str, field: str) -> None:
    """Whether the nodes could hold all servers at once if nobody else had any."""
    pool = Pool(limits.nodes)
    servers = [(limits.ask(key[0], key[2]), key) for key, count in needed.items() for _ in range(count)]
    # As few small ones as possible are in the way of the large ones.
    for ask, (role, _, options) in sorted(servers, key=lambda one: -one[0].total):
        devices = pool.find(ask)
        if devices is not None:
            pool.take(devices)
            continue
        if Pool(limits.nodes).find(ask) is None:
            text = f"{who} needs a {options.engine} {role} server with {ask.describe()}, which no node has"
        else:
            total = sum(each.total for each, _ in servers)
            text = f"{who} needs {total} GPUs at once, which the nodes cannot hold"
        have = ", ".join(f"{node.name} has {node.gpus}" for node in limits.nodes)
        text = f"{text}: {have} (setting engine_gpus[{options.engine}]={limits.engine_gpus[options.engine]})"
        raise ServiceError(Reason.CANNOT_BE_SATISFIED, text, field=field)
