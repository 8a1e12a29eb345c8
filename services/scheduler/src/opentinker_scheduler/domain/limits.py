"""What may be started, and what a server is started with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentinker_scheduler.domain.model import Role, ServerOptions, SlotSpec
from opentinker_scheduler.domain.nodes import Ask, Node

Key = tuple[Role, str, ServerOptions]
"""What a server is started as: role, base model and options."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be started."""

    can_launch: bool = True
    max_servers: int = 32
    max_engine_servers: Mapping[str, int] = field(default_factory=dict)
    max_grants: int = 100
    trainer_slots: int = 8
    inference_slots: int = 8
    merged_slots: int = 1
    engine_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs that a rank of a server takes, by engine; none where it is not named."""
    nodes: tuple[Node, ...] = ()
    """Where servers are started. None: nobody knows, and GPUs are not given out."""
    default_engines: Mapping[Role, str] = field(default_factory=dict)
    """What a slot is counted as that names no engine."""
    reserve_after_s: float = 60.0
    """How long a job waits before slots are kept for it."""

    def slots_of(self, role: Role, options: ServerOptions) -> int:
        """Slots that a server is started with; a merged one serves one policy at a time."""
        if role is Role.TRAINER:
            return self.trainer_slots
        return self.merged_slots if options.serving_mode == "merged" else self.inference_slots

    def gpus_of(self, role: Role, options: ServerOptions) -> int:
        """GPUs that a server counts as."""
        return self._rank_gpus(role, options) * max(1, options.ranks)

    def ask(self, role: Role, options: ServerOptions) -> Ask:
        """GPUs that a server is given."""
        gpus = self._rank_gpus(role, options) if self.nodes else 0
        return Ask(max(1, options.ranks), gpus, options.accelerator)

    @property
    def gives_gpus(self) -> bool:
        """Whether servers are given GPUs, and none that are another's."""
        return bool(self.nodes) and any(self.engine_gpus.values())

    def _rank_gpus(self, role: Role, options: ServerOptions) -> int:
        return self.engine_gpus.get(options.engine or self.default_engines.get(role, ""), 0)

    def per_server(self, spec: SlotSpec) -> tuple[int, int]:
        """Slots and GPUs of a server for a slot."""
        return self.slots_of(spec.role, spec.options), self.gpus_of(spec.role, spec.options)

    def servers_needed(self, slots: Sequence[SlotSpec]) -> Mapping[Key, int]:
        """How many servers of each kind an empty cluster would start for a job."""
        counts: dict[Key, int] = {}
        replicas: dict[Key, int] = {}
        for spec in slots:
            key = (spec.role, spec.base_model, spec.options)
            counts[key] = counts.get(key, 0) + spec.count
            if spec.role is Role.INFERENCE:
                replicas[key] = max(replicas.get(key, 0), spec.count)
        return {
            key: max(-(-count // self.slots_of(key[0], key[2])), replicas.get(key, 0))
            for key, count in counts.items()
        }
