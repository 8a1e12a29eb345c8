"""The torch engine: one base model, many policies, one operation at a time.

It knows neither seqs nor storage: the front orders the operations, and files go to directories that the front
names. An operation that raises has changed nothing.
"""

import gc
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, TuningSpec
from opentinker_trainer.engine.adapters import AdapterBank
from opentinker_trainer.engine.base_model import BaseModel, load_base_model
from opentinker_trainer.engine.compute import (
    BackwardPass,
    Compute,
    ComputeSettings,
    ForwardOutput,
    ForwardPass,
)
from opentinker_trainer.engine.full import FullWeights
from opentinker_trainer.engine.model_files import ModelFiles
from opentinker_trainer.engine.objective import BackwardOutput
from opentinker_trainer.engine.policy import Policy, StepReport
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.state_files import load_state, save_state
from opentinker_trainer.engine.tensor_files import Writer
from opentinker_trainer.engine.weights import Weights
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine was launched; together with a request this decides every bit of the result."""

    model_path: Path
    model_id: str
    dtype: str = "float32"
    forward_dtype: str = ""
    """Precision of passes; empty: `dtype`."""
    attention: str = "sdpa"
    device: str = "cpu"
    threads: int = 1
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    shard_bytes: int = 4 * 2**30
    """Most bytes of one file of weights or optimizer state."""


@dataclass(frozen=True, slots=True)
class _OpenPass:
    """A pass of which some slices may have run."""

    work: ForwardPass | BackwardPass
    use_base_model: bool = False


class TorchEngine:
    """Policies over a base model."""

    def __init__(self, settings: EngineSettings, ranks: Ranks | None = None) -> None:
        """Load the base model. ServiceError as `load_base_model`, UNSUPPORTED_OPTION without the device.

        With `ranks` of several processes each of them has an engine, and every call is made on all of them.
        """
        _check_device(settings.device)
        transformers.utils.logging.disable_progress_bar()
        self._settings = settings
        self.base: BaseModel = load_base_model(
            settings.model_path,
            settings.dtype,
            settings.attention,
            torch.device(settings.device),
            settings.forward_dtype,
        )
        self._ranks = ranks or Ranks()
        self._bank = AdapterBank(self.base, self._ranks, settings.model_id)
        self._compute = Compute(self.base, self._ranks, settings.compute, settings.threads)
        self._policies: dict[str, Policy] = {}
        self._open: dict[str, _OpenPass] = {}
        """By policy: at most one pass each."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies it holds."""
        return tuple(self._policies)

    def create_policy(self, name: str, spec: TuningSpec, seed: int) -> Policy:
        """A new policy; the same spec and seed give the same bits. One of that name is replaced.

        ServiceError INVALID_FIELD or UNSUPPORTED_OPTION if the model cannot be tuned so.
        """
        if name in self._policies:
            self.drop_policy(name)
        generator = torch.Generator().manual_seed(seed)
        policy = Policy(self._weights(spec, generator), generator)
        self._policies[name] = policy
        return policy

    def drop_policy(self, name: str) -> None:
        """Forget a policy; one that is not there is forgotten already."""
        self._open.pop(name, None)
        policy = self._policies.pop(name, None)
        if policy is not None:
            whole_model = isinstance(policy.weights, FullWeights)
            policy.weights.delete()
            del policy
            if whole_model:
                # Modules and hooks refer to each other: without this their memory would stay for a while.
                gc.collect()

    def begin_forward(self, name: str, samples: Sequence[Sample], *, use_base_model: bool = False) -> int:
        """Open a Forward of the policy, or of the bare base model; how many slices it takes."""
        view = self._bank.bare if use_base_model else self._policy(name).weights.view
        self._open[name] = _OpenPass(self._compute.begin_forward(view, samples), use_base_model)
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
        view = self._policy(name).weights.view
        work = self._compute.begin_forward_backward(view, samples, components, skip_inert=skip_inert)
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
        with self._bank.base_only() if opened.use_base_model else policy.weights.active():
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
        writer = self._writer(directory)
        save_state(self._policy(name), writer)
        return writer.finish()

    def load_state(
        self, name: str, directory: Path, *, weights_only: bool = False, drop_gradient: bool = False
    ) -> int:
        """Replace the policy's state by a directory's; returns the optimizer steps it has taken."""
        policy = self._policy(name)
        self._open.pop(name, None)
        load_state(policy, directory, weights_only=weights_only, drop_gradient=drop_gradient)
        return policy.steps

    def export(self, name: str, directory: Path) -> list[str]:
        """Write the weights as PEFT, transformers and vLLM load them; returns the file names."""
        writer = self._writer(directory)
        self._policy(name).weights.save(writer, exact=False)
        return writer.finish()

    def free_bytes(self) -> int:
        """Free memory of the device; 0 where it is the host's."""
        if self.base.device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self.base.device)
        return int(free)

    def base_digest(self) -> str:
        """SHA-256 over the base weights in memory: it never changes, whatever is trained."""
        digest = hashlib.sha256()
        for name, parameter in self.base.named_weights():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            raise ServiceError(Reason.POLICY_NOT_FOUND, f"the engine does not hold {name}")
        return policy

    def _writer(self, directory: Path) -> Writer:
        return Writer(directory, self._settings.shard_bytes, active=self._ranks.first)

    def _weights(self, spec: TuningSpec, generator: torch.Generator) -> Weights:
        if isinstance(spec, FullSpec):
            files = ModelFiles(self.base.path, self.base.tied_names)
            return FullWeights(self.base, spec, self._ranks, files)
        return self._bank.create(spec, generator)


def _check_device(device: str) -> None:
    number = torch.device(device).index or 0
    if device.startswith("cuda") and torch.cuda.device_count() <= number:
        text = f"{device} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="device")
