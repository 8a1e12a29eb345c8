"""The torch engine: one base model, many policies, one operation at a time.

It knows neither seqs nor storage: the front orders the operations, and files go to directories that the front
names. An operation that raises has changed nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, LoraSpec
from opentinker_trainer.engine.adapters import AdapterBank
from opentinker_trainer.engine.base_model import BaseModel, load_base_model
from opentinker_trainer.engine.compute import Compute, ComputeSettings, ForwardOutput
from opentinker_trainer.engine.objective import BackwardOutput
from opentinker_trainer.engine.policy import Policy, StepReport
from opentinker_trainer.engine.state_files import load_state, save_adapter, save_state
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine was launched; together with a request this decides every bit of the result."""

    model_path: Path
    model_id: str
    dtype: str = "float32"
    attention: str = "sdpa"
    threads: int = 1
    compute: ComputeSettings = field(default_factory=ComputeSettings)


class TorchEngine:
    """Policies over a base model."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the base model. ServiceError as `load_base_model`."""
        torch.set_num_threads(settings.threads)
        transformers.utils.logging.disable_progress_bar()
        self._settings = settings
        self.base: BaseModel = load_base_model(settings.model_path, settings.dtype, settings.attention)
        self._bank = AdapterBank(self.base)
        self._compute = Compute(self.base, settings.compute)
        self._policies: dict[str, Policy] = {}

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies it holds."""
        return tuple(self._policies)

    def create_policy(self, name: str, spec: LoraSpec, seed: int) -> Policy:
        """A new policy; the same spec and seed give the same bits. One of that name is replaced."""
        if name in self._policies:
            self.drop_policy(name)
        generator = torch.Generator().manual_seed(seed)
        policy = Policy(self._bank.create(spec, generator), generator)
        self._policies[name] = policy
        return policy

    def drop_policy(self, name: str) -> None:
        """Forget a policy; one that is not there is forgotten already."""
        policy = self._policies.pop(name, None)
        if policy is not None:
            self._bank.delete(policy.adapter)

    def forward(self, name: str, samples: Sequence[Sample], *, use_base_model: bool = False) -> ForwardOutput:
        """Logprobs at the loss tokens, of the policy or of the bare base model."""
        with self._bank.base_only() if use_base_model else self._active(name):
            return self._compute.forward(samples)

    def forward_backward(
        self,
        name: str,
        samples: Sequence[Sample],
        components: Sequence[Component],
        *,
        skip_inert: bool = False,
    ) -> BackwardOutput:
        """Add the gradient of the request to the policy's accumulated one."""
        policy = self._policy(name)
        with self._active(name):
            output = self._compute.forward_backward(
                samples, components, policy.parameters, skip_inert=skip_inert
            )
        policy.add(output.gradients)
        return output

    def optim_step(
        self, name: str, hyper: AdamWStep, denominators: Mapping[str, float] | None = None
    ) -> StepReport:
        """Apply the accumulated gradient and clear it."""
        return self._policy(name).step(hyper, denominators or {})

    def save_state(self, name: str, directory: Path) -> list[str]:
        """Write the policy's whole state into a directory; returns the file names."""
        return save_state(self._policy(name), self._settings.model_id, directory)

    def load_state(
        self, name: str, directory: Path, *, weights_only: bool = False, drop_gradient: bool = False
    ) -> int:
        """Replace the policy's state by a directory's; returns the optimizer steps it has taken."""
        policy = self._policy(name)
        load_state(policy, directory, weights_only=weights_only, drop_gradient=drop_gradient)
        return policy.steps

    def export_adapter(self, name: str, directory: Path) -> list[str]:
        """Write the weights in PEFT layout; returns the file names."""
        return save_adapter(self._policy(name).adapter, self._settings.model_id, directory)

    def base_digest(self) -> str:
        """SHA-256 over the base weights in memory: it never changes, whatever is trained."""
        digest = hashlib.sha256()
        for name, parameter in self.base.named_weights():
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            raise ServiceError(Reason.POLICY_NOT_FOUND, f"the engine does not hold {name}")
        return policy

    @contextmanager
    def _active(self, name: str) -> Iterator[None]:
        with self._bank.active(self._policy(name).adapter):
            yield
