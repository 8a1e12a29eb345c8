"""A policy as its user holds it: train it, publish it, sample from it.

Every method returns at once with something to await (from any event loop) or to block on with `.result()`.
Trainer operations are ordered and pipelined: start the next before the previous has ended.

    step = policy.forward_backward(samples, loss=PPO()), policy.optim_step(AdamW(lr=1e-4)), policy.publish()
    for operation in step: await operation
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker import errors
from opentinker.connection.blobs import Blobs
from opentinker.connection.jobs import Job
from opentinker.connection.on_demand import Slots
from opentinker.connection.portal import Pending, Portal
from opentinker.sampling.sampled import Sampled
from opentinker.sampling.sampler import Sampler
from opentinker.training import custom, requests, results
from opentinker.training.losses import CrossEntropy, Losses, components, named
from opentinker.training.operations import Operation, OperationChannel, Prepared
from opentinker.training.samples import TrainSample, TrainSamples, check, takes_part
from opentinker.training.tuning import AdamW
from opentinkerapi.trainer.v1 import operation_pb2

if TYPE_CHECKING:
    from opentinker.connection.cluster import Cluster
    from opentinker.serving.deployments import Deployment


class _Gradient(Operation[results.ForwardBackwardResult]):
    """A ForwardBackward, with what an OptimStep must know of it."""

    deferred: Mapping[str, float]
    """Components without a denominator, and their loss tokens."""


class Policy(Sampled):
    """A model being trained. Sampling uses `version`, the newest published one, unless told otherwise."""

    def __init__(
        self,
        cluster: "Cluster",
        portal: Portal,
        job: Job,
        blobs: Blobs,
        *,
        name: str,
        base_model: str,
        published: results.Version,
        serving: Slots | None = None,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.base_model = base_model
        self.published = published
        """The newest published version; at first version 0, the policy as created."""
        self.checkpoint: results.Checkpoint | None = None
        """The last one saved."""
        self.step = 0
        """Optimizer steps taken."""
        self.serving = serving or job
        """The slots that sample: its job's, or those of a job made when they are needed."""
        super().__init__(portal, job, Sampler(self.serving, name, blobs))
        self._blobs = blobs
        self._operations = OperationChannel(portal, job, name)
        self._open: list[_Gradient] = []

    @property
    def version(self) -> int:
        """Number of the newest published version."""
        return self.published.version

    def __repr__(self) -> str:
        return f"<Policy {self.name} version {self.version} over {self.base_model}>"

    # --- training ---------------------------------------------------------------------------------------

    def forward(
        self,
        samples: Sequence[TrainSample],
        *,
        entropy: bool = False,
        values: bool = False,
        base_model: bool = False,
    ) -> Operation[results.ForwardResult]:
        """Logprobs of given rows without a gradient, at the rows' temperature; on request their entropy, and
        what the value head says. `base_model`: under the model as it was loaded, a reference for KL terms.
        """
        check(samples)

        async def convert(wire: operation_pb2.Operation) -> results.ForwardResult:
            return results.forward(wire, await self._outputs(wire.forward, operation_pb2.ForwardResult()))

        def prepare() -> Awaitable[Prepared]:
            return requests.forward(
                samples, self._blobs, entropy=entropy, values=values, base_model=base_model
            )

        return self._operations.submit(Operation(self.portal, "forward", prepare, convert))

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        loss: Losses,
        *,
        denominator: float | Mapping[str, float] | None = None,
        return_logprobs: bool = False,
        skip_inert: bool = False,
    ) -> Operation[results.ForwardBackwardResult]:
        """Add the gradient of sum(loss) / denominator to the policy's accumulated gradient.

        Without a denominator, `optim_step` divides by the loss tokens of everything it covers, so that
        several calls accumulate as one batch would. `skip_inert` leaves rows with advantage 0 out of the
        computation, never out of a denominator. Raises InvalidSample here, before anything is sent.
        """
        terms = components(loss, denominator)
        check(samples, {name: term.loss.needs for name, term in named(loss).items()})

        async def convert(wire: operation_pb2.Operation) -> results.ForwardBackwardResult:
            outputs = await self._outputs(wire.forward_backward, operation_pb2.ForwardBackwardResult())
            return results.forward_backward(wire, outputs)

        def prepare() -> Awaitable[Prepared]:
            return requests.forward_backward(
                samples, terms, self._blobs, logprobs=return_logprobs, skip_inert=skip_inert
            )

        gradient = _Gradient(self.portal, "forward-backward", prepare, convert)
        gradient.deferred = {
            term.name: float(sum(row.loss_tokens for row in samples if takes_part(row, term.name)))
            for term in terms
            if term.HasField("deferred")
        }
        self._open.append(gradient)
        self._operations.submit(gradient)
        return gradient

    def forward_backward_custom(
        self, samples: Sequence[TrainSample], function: custom.CustomLoss
    ) -> Pending[custom.CustomResult]:
        """Add the gradient of a loss of one's own: a function of the logprobs of all rows that gives the loss
        and its derivatives (see `opentinker.training.custom`). The rows' `weights` are not used.

        Two passes, so await it before `optim_step`. What the function raises is raised here.
        """

        async def both() -> custom.CustomResult:
            scored = await self.forward(samples)
            # In a thread: leases are renewed on this loop, and the function may take long.
            loss, rows = await asyncio.to_thread(custom.apply, samples, scored, function)
            done = await self.forward_backward(rows, {custom.COMPONENT: CrossEntropy()}, denominator=1.0)
            return custom.result(loss, done, scored)

        return Pending.of(self.portal, both())

    def optim_step(
        self, optimizer: AdamW, *, denominators: Mapping[str, float] | None = None
    ) -> Operation[results.StepResult]:
        """Apply the gradients accumulated since the last step, and clear them.

        Covers every `forward_backward` called since, except those whose failure has been seen by the
        caller. No step is taken on half a gradient: if one of them failed meanwhile, IncompleteBatch, with
        its error as cause.
        """
        covered = [gradient for gradient in self._open if not (gradient.error and gradient.retrieved)]
        self._open = []

        async def prepare() -> Prepared:
            if not covered:
                raise errors.IncompleteBatch(
                    "no forward_backward since the last step", reason=errors.Reason.INCOMPLETE_BATCH
                )
            if any(gradient.seq == 0 for gradient in covered):
                raise errors.IncompleteBatch(
                    "a forward_backward of this step was refused; nothing was changed",
                    reason=errors.Reason.INCOMPLETE_BATCH,
                )
            divisors: dict[str, float] = {}
            for gradient in covered:
                for name, tokens in gradient.deferred.items():
                    divisors[name] = divisors.get(name, 0.0) + tokens
            divisors |= denominators or {}
            return requests.optim_step(optimizer, [gradient.seq for gradient in covered], divisors)

        async def convert(wire: operation_pb2.Operation) -> results.StepResult:
            result = results.step_result(wire)
            self.step = result.step
            return result

        step = _Step(self.portal, "optim-step", prepare, convert)
        step.explain = lambda error: self._refused(error, covered)
        return self._operations.submit(step)

    def publish(self) -> Operation[results.Version]:
        """Make the current weights the next policy version; sampling uses it once this has ended."""

        async def prepare() -> Prepared:
            return requests.publish_weights()

        async def convert(wire: operation_pb2.Operation) -> results.Version:
            self.published = results.version(wire)
            return self.published

        return self._operations.submit(Operation(self.portal, "publish", prepare, convert))

    def save_checkpoint(
        self, display_name: str = "", *, keep: int | None = None, ttl: timedelta | None = None
    ) -> Operation[results.Checkpoint]:
        """Save everything needed to resume the policy.

        `keep`: once it is complete, only the newest so many checkpoints of the policy stay, and those that
        runs go on from. `ttl`: how long it stays at least; a policy's newest stays longer. Default: the
        server's settings.
        """
        if keep is not None and keep < 1:
            raise errors.invalid("keep", f"must be at least 1, not {keep}")
        if ttl is not None and ttl.total_seconds() <= 0:
            raise errors.invalid("ttl", f"must be positive, not {ttl}")

        async def prepare() -> Prepared:
            return requests.save_checkpoint(display_name, keep, ttl)

        async def convert(wire: operation_pb2.Operation) -> results.Checkpoint:
            self.checkpoint = results.checkpoint(wire.save_checkpoint.checkpoint)
            return self.checkpoint

        return self._operations.submit(Operation(self.portal, "save", prepare, convert))

    def restore(self, checkpoint: results.Checkpoint | str, *, weights_only: bool = False) -> Operation[int]:
        """Replace weights and optimizer by those of a checkpoint; gives the optimizer steps of that state.

        Sampling goes on with the version published before, until the next `publish`.
        """
        name = checkpoint if isinstance(checkpoint, str) else checkpoint.name

        async def prepare() -> Prepared:
            return requests.restore_checkpoint(name, weights_only)

        async def convert(wire: operation_pb2.Operation) -> int:
            self.step = wire.restore_checkpoint.step
            return self.step

        return self._operations.submit(Operation(self.portal, "restore", prepare, convert))

    def export(
        self, directory: str | Path, checkpoint: results.Checkpoint | str | None = None
    ) -> Pending[Path]:
        """Write the newest published weights, or a checkpoint's, into a new directory: `Cluster.export`."""
        name = f"{self.name}/versions/{self.version}"
        if checkpoint is not None:
            name = checkpoint if isinstance(checkpoint, str) else checkpoint.name
        return self.cluster.export(name, directory)

    def deploy(self, name: str, **options: Any) -> "Pending[Deployment]":
        """Serve the newest published version under a name; see `Cluster.serve`."""
        return self.cluster.serve(f"{self.name}/versions/{self.version}", name, **options)

    # --- the rest ---------------------------------------------------------------------------------------

    async def shut(self) -> None:
        """Stop this client's part in it; the records and versions stay. On the client's loop."""
        await self._operations.close()
        await self.sampler.close()

    async def _outputs(self, result: Any, empty: Any) -> Sequence[operation_pb2.SampleOutput]:
        if result.HasField("outputs_blob"):
            empty.ParseFromString(await self._blobs.download(result.outputs_blob))
            result = empty
        outputs: Sequence[operation_pb2.SampleOutput] = result.outputs
        return outputs

    def _refused(self, error: BaseException, covered: Sequence[_Gradient]) -> Any:
        """The step was not taken: keep the gradients that stand for the next one, and name what is to
        blame.
        """
        if isinstance(error, errors.OpenTinkerError):
            failed = next((gradient.error for gradient in covered if gradient.error is not None), None)
            error.__cause__ = error.__cause__ or failed
            self._open[:0] = [gradient for gradient in covered if gradient.error is None and gradient.seq]
        return error


class _Step(Operation[results.StepResult]):
    """An OptimStep that says why it was refused."""

    explain: Callable[[BaseException], BaseException]

    def fail(self, error: BaseException) -> None:
        super().fail(self.explain(error))


__all__ = ["Policy", "TrainSamples"]
