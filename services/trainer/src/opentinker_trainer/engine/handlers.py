"""The engine's methods, from message to message. They run one at a time, in order of arrival."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from safetensors import SafetensorError

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import Handler
from opentinker_trainer import wire
from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.domain.tuning import OUTPUT_LAYER
from opentinker_trainer.engine.checkpointing import decoder_layers
from opentinker_trainer.engine.compute import ComputeSettings, ForwardOutput
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.engine.objective import BackwardOutput, SampleScores
from opentinker_trainer.engine.ranks import Ranks
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.images import ImageSettings
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats
from opentinkerapi.trainer.v1 import operation_pb2


@dataclass(slots=True)
class _Opened:
    """What the answer of an open pass shall hold, and how long its slices took so far."""

    return_entropy: bool = False
    return_logprobs: bool = False
    return_values: bool = False
    engine_s: float = 0.0


class EngineHandlers:
    """Serves one TorchEngine, loaded by the first call."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        """The group that this process belongs to; set before the engine is loaded."""
        self._loaded: TorchEngine | None = None
        self._opened: dict[str, _Opened] = {}

    def table(self) -> Mapping[str, Handler]:
        """Method name -> handler."""
        return {
            "Load": Handler(pb.TrainLoadRequest, self.load),
            "CreatePolicy": Handler(pb.TrainCreatePolicyRequest, self.create_policy),
            "DropPolicy": Handler(pb.TrainDropPolicyRequest, self.drop_policy),
            "Begin": Handler(pb.TrainBeginRequest, self.begin),
            "Advance": Handler(pb.TrainAdvanceRequest, self.advance),
            "OptimStep": Handler(pb.TrainOptimStepRequest, self.optim_step),
            "Save": Handler(pb.TrainSaveRequest, self.save),
            "Restore": Handler(pb.TrainRestoreRequest, self.restore),
        }

    def load(self, request: pb.TrainLoadRequest) -> pb.TrainLoadResponse:
        plan = PlanSettings(
            token_budget=request.micro_batch_tokens,
            max_rows=request.micro_batch_rows,
            share_prefix=request.share_prefix,
            max_shared_row_tokens=request.max_shared_row_tokens,
            pack=request.pack_rows,
        )
        self._loaded = TorchEngine(
            EngineSettings(
                model_path=Path(request.model_path),
                model_id=request.model_id,
                dtype=request.dtype,
                forward_dtype=request.forward_dtype,
                device=f"cuda:{self.ranks.local}" if request.device == "cuda" else "cpu",
                attention=request.attention,
                threads=request.threads,
                compute=ComputeSettings(plan, request.logit_rows, request.slice_tokens, request.lanes or 1),
                shard_bytes=request.export_shard_bytes or 4 * 2**30,
            ),
            self.ranks,
        )
        base = self._loaded.base
        return pb.TrainLoadResponse(
            vocab_size=base.vocab_size,
            context_tokens=base.context_tokens,
            linear_layers=[
                pb.LinearLayers(name=name, count=count, in_features=inputs, out_features=outputs)
                for name, (count, inputs, outputs) in base.linear_layers.items()
            ],
            weight_count=base.weight_count,
            output_layer=pb.LinearLayers(
                name=OUTPUT_LAYER, count=1, in_features=base.hidden_size, out_features=base.vocab_size
            ),
            activation_checkpointing=bool(decoder_layers(base.model)),
            free_bytes=self._loaded.free_bytes(),
        )

    def create_policy(self, request: pb.TrainCreatePolicyRequest) -> pb.TrainCreatePolicyResponse:
        self._engine.create_policy(request.policy, wire.tuning_of(request.tuning), request.seed)
        return pb.TrainCreatePolicyResponse()

    def drop_policy(self, request: pb.TrainDropPolicyRequest) -> pb.TrainDropPolicyResponse:
        self._engine.drop_policy(request.policy)
        return pb.TrainDropPolicyResponse()

    def begin(self, request: pb.TrainBeginRequest) -> pb.TrainBeginResponse:
        started = time.monotonic()
        if request.WhichOneof("pass") == "forward":
            policy = request.forward.policy
            slices = self._engine.begin_forward(
                policy,
                wire.samples_of(request.forward.samples, self._images),
                use_base_model=request.forward.use_base_model,
            )
            opened = _Opened(request.forward.return_entropy, return_values=request.forward.return_values)
        else:
            policy = request.forward_backward.policy
            slices = self._engine.begin_forward_backward(
                policy,
                wire.samples_of(request.forward_backward.samples, self._images),
                wire.components_of(request.forward_backward.losses),
                skip_inert=request.forward_backward.skip_inert_rows,
            )
            opened = _Opened(return_logprobs=request.forward_backward.return_logprobs)
        opened.engine_s = time.monotonic() - started
        self._opened[policy] = opened
        return pb.TrainBeginResponse(slices=slices)

    def advance(self, request: pb.TrainAdvanceRequest) -> pb.TrainAdvanceResponse:
        started = time.monotonic()
        output = self._engine.advance(request.policy)
        opened = self._opened[request.policy]
        opened.engine_s += time.monotonic() - started
        if output is None:
            return pb.TrainAdvanceResponse()
        del self._opened[request.policy]
        if isinstance(output, BackwardOutput):
            return pb.TrainAdvanceResponse(forward_backward=_backward_response(output, opened))
        return pb.TrainAdvanceResponse(forward=_forward_response(output, opened))

    def optim_step(self, request: pb.TrainOptimStepRequest) -> pb.TrainOptimStepResponse:
        started = time.monotonic()
        clip_norm = request.clip_norm if request.HasField("clip_norm") else None
        hyper = wire.step_of(request.adamw, clip_norm)
        report = self._engine.optim_step(request.policy, hyper, wire.denominators_of(request.denominators))
        metrics = {
            "actor/lr": (hyper.learning_rate, 1.0),
            "actor/skipped_steps": (float(report.skipped), 1.0),
        }
        if not report.skipped:
            metrics["actor/grad_norm"] = (report.grad_norm, 1.0)
        result = operation_pb2.OptimStepResult(
            step=report.step,
            grad_norm=report.grad_norm,
            skipped=report.skipped,
            consecutive_skips=report.consecutive_skips,
            metrics=wire.metric_messages(metrics),
        )
        return pb.TrainOptimStepResponse(result=result, engine_time=_since(started))

    def save(self, request: pb.TrainSaveRequest) -> pb.TrainSaveResponse:
        started = time.monotonic()
        write = self._engine.export if request.adapter_only else self._engine.save_state
        try:
            files = write(request.policy, Path(request.directory))
        except (OSError, SafetensorError) as error:
            text = f"{request.directory} cannot be written: {error}"
            raise ServiceError(Reason.STORAGE_FULL, text) from error
        return pb.TrainSaveResponse(files=files, engine_time=_since(started))

    def restore(self, request: pb.TrainRestoreRequest) -> pb.TrainRestoreResponse:
        started = time.monotonic()
        step = self._engine.load_state(
            request.policy,
            Path(request.directory),
            weights_only=request.weights_only,
            drop_gradient=request.drop_gradient,
        )
        return pb.TrainRestoreResponse(step=step, engine_time=_since(started))

    @property
    def _images(self) -> ImageSettings | None:
        vision = self._engine.base.vision
        return None if vision is None else vision.settings

    @property
    def _engine(self) -> TorchEngine:
        assert self._loaded is not None, "the front loads before it asks for anything else"
        return self._loaded


def _forward_response(output: ForwardOutput, opened: _Opened) -> pb.TrainForwardResponse:
    result = operation_pb2.ForwardResult(
        outputs=[
            _output(scores, entropy=opened.return_entropy, values=opened.return_values)
            for scores in output.scores
        ],
        metrics=wire.metric_messages(output.metrics),
    )
    return pb.TrainForwardResponse(result=result, engine_time=_duration(opened.engine_s))


def _backward_response(output: BackwardOutput, opened: _Opened) -> pb.TrainForwardBackwardResponse:
    result = operation_pb2.ForwardBackwardResult(
        components=[
            operation_pb2.ComponentSum(component=name, loss_sum=total, weight=weight)
            for name, (total, weight) in output.loss_sums.items()
        ],
        metrics=wire.metric_messages(output.metrics),
        trained_tokens=output.trained_tokens,
    )
    if opened.return_logprobs:
        result.outputs.extend(_output(scores) for scores in output.scores)
    return pb.TrainForwardBackwardResponse(result=result, engine_time=_duration(opened.engine_s))


def _output(
    scores: SampleScores, *, entropy: bool = False, values: bool = False
) -> operation_pb2.SampleOutput:
    if scores.skipped:
        return operation_pb2.SampleOutput(skipped=True)
    return operation_pb2.SampleOutput(
        logprobs=pack_floats(scores.logprobs),
        entropy=pack_floats(scores.entropy) if entropy else b"",
        values=pack_floats(scores.values) if values and scores.values is not None else b"",
    )


def _since(started: float) -> Duration:
    return _duration(time.monotonic() - started)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration
