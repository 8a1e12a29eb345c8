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
from opentinker_trainer.engine.compute import (
    BackwardPass,
    Compute,
    ComputeSettings,
    ForwardOutput,
    ForwardPass,
)
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


@dataclass(frozen=True, slots=True)
class _OpenPass:
    """A pass of which some slices may have run."""

    work: ForwardPass | BackwardPass
    use_base_model: bool = False


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
        self._open: dict[str, _OpenPass] = {}
        """By policy: at most one pass each."""

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
        self._open.pop(name, None)
        policy = self._policies.pop(name, None)
        if policy is not None:
            self._bank.delete(policy.adapter)

    def begin_forward(self, name: str, samples: Sequence[Sample], *, use_base_model: bool = False) -> int:
        """Open a Forward of the policy, or of the bare base model; how many slices it takes."""
        self._policy(name)
        self._open[name] = _OpenPass(self._compute.begin_forward(samples), use_base_model)
        return self._open[name].work.slices

    def begin_forward_backward(
        self,
        name: str,
        samples: Sequence[Sample],
        components: Sequence[Component],
        *,
        skip_inert: bool = False,
    ) -> int:
        """Open a ForwardBackward of the policy; how many slices it takes."""
        parameters = self._policy(name).parameters
        work = self._compute.begin_forward_backward(samples, components, parameters, skip_inert=skip_inert)
        self._open[name] = _OpenPass(work)
        return work.slices

    def advance(self, name: str) -> ForwardOutput | BackwardOutput | None:
        """Run the next slice of the policy's open pass; its output if that was the last one.

        Only then is a gradient added to the policy's accumulated one. A slice that raises ends the pass.
        """
        policy = self._policy(name)
        opened = self._open.pop(name, None)
        if opened is None:
            raise ServiceError(Reason.INTERNAL, f"{name} has no open pass")
        work = opened.work
        with self._bank.base_only() if opened.use_base_model else self._active(name):
            work.run_slice()
        if not work.ended:
            self._open[name] = opened
            return None
        output = work.finish()
        if isinstance(output, BackwardOutput):
            policy.add(output.gradients)
        return output

    def forward(self, name: str, samples: Sequence[Sample], *, use_base_model: bool = False) -> ForwardOutput:
        """A whole Forward: logprobs at the loss tokens, of the policy or of the bare base model."""
        self.begin_forward(name, samples, use_base_model=use_base_model)
        output = self._advance_to_the_end(name)
        assert isinstance(output, ForwardOutput)
        return output

    def forward_backward(
        self,
        name: str,
        samples: Sequence[Sample],
        components: Sequence[Component],
        *,
        skip_inert: bool = False,
    ) -> BackwardOutput:
        """A whole ForwardBackward: adds the gradient of the request to the policy's accumulated one."""
        self.begin_forward_backward(name, samples, components, skip_inert=skip_inert)
        output = self._advance_to_the_end(name)
        assert isinstance(output, BackwardOutput)
        return output

    def _advance_to_the_end(self, name: str) -> ForwardOutput | BackwardOutput:
        while (output := self.advance(name)) is None:
            pass
        return output

    def optim_step(
        self, name: str, hyper: AdamWStep, denominators: Mapping[str, float] | None = None
    ) -> StepReport:
        """Apply the accumulated gradient and clear it."""
        self._open.pop(name, None)
        return self._policy(name).step(hyper, denominators or {})

    def save_state(self, name: str, directory: Path) -> list[str]:
        """Write the policy's whole state into a directory; returns the file names."""
        return save_state(self._policy(name), self._settings.model_id, directory)

    def load_state(
        self, name: str, directory: Path, *, weights_only: bool = False, drop_gradient: bool = False
    ) -> int:
        """Replace the policy's state by a directory's; returns the optimizer steps it has taken."""
        policy = self._policy(name)
        self._open.pop(name, None)
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
