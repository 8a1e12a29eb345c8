"""The engine's methods, from message to message. They run one at a time, in order of arrival."""

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from safetensors import SafetensorError

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import Handler
from opentinker_trainer import wire
from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.engine.objective import SampleScores
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats
from opentinkerapi.trainer.v1 import operation_pb2


class EngineHandlers:
    """Serves one TorchEngine, loaded by the first call."""

    def __init__(self) -> None:
        self._loaded: TorchEngine | None = None

    def table(self) -> Mapping[str, Handler]:
        """Method name -> handler."""
        return {
            "Load": Handler(pb.TrainLoadRequest, self.load),
            "CreatePolicy": Handler(pb.TrainCreatePolicyRequest, self.create_policy),
            "DropPolicy": Handler(pb.TrainDropPolicyRequest, self.drop_policy),
            "Forward": Handler(pb.TrainForwardRequest, self.forward),
            "ForwardBackward": Handler(pb.TrainForwardBackwardRequest, self.forward_backward),
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
        )
        self._loaded = TorchEngine(
            EngineSettings(
                model_path=Path(request.model_path),
                model_id=request.model_id,
                dtype=request.dtype,
                attention=request.attention,
                threads=request.threads,
                compute=ComputeSettings(plan, request.logit_rows),
            )
        )
        base = self._loaded.base
        return pb.TrainLoadResponse(
            vocab_size=base.vocab_size,
            context_tokens=base.context_tokens,
            linear_layers=[
                pb.LinearLayers(name=name, count=count, in_features=inputs, out_features=outputs)
                for name, (count, inputs, outputs) in base.linear_layers.items()
            ],
        )

    def create_policy(self, request: pb.TrainCreatePolicyRequest) -> pb.TrainCreatePolicyResponse:
        self._engine.create_policy(request.policy, wire.lora_of(request.lora), request.seed)
        return pb.TrainCreatePolicyResponse()

    def drop_policy(self, request: pb.TrainDropPolicyRequest) -> pb.TrainDropPolicyResponse:
        self._engine.drop_policy(request.policy)
        return pb.TrainDropPolicyResponse()

    def forward(self, request: pb.TrainForwardRequest) -> pb.TrainForwardResponse:
        started = time.monotonic()
        output = self._engine.forward(
            request.policy, wire.samples_of(request.samples), use_base_model=request.use_base_model
        )
        result = operation_pb2.ForwardResult(
            outputs=[_output(scores, entropy=request.return_entropy) for scores in output.scores],
            metrics=wire.metric_messages(output.metrics),
        )
        return pb.TrainForwardResponse(result=result, engine_time=_since(started))

    def forward_backward(self, request: pb.TrainForwardBackwardRequest) -> pb.TrainForwardBackwardResponse:
        started = time.monotonic()
        output = self._engine.forward_backward(
            request.policy,
            wire.samples_of(request.samples),
            wire.components_of(request.losses),
            skip_inert=request.skip_inert_rows,
        )
        result = operation_pb2.ForwardBackwardResult(
            components=[
                operation_pb2.ComponentSum(component=name, loss_sum=total, weight=weight)
                for name, (total, weight) in output.loss_sums.items()
            ],
            metrics=wire.metric_messages(output.metrics),
            trained_tokens=output.trained_tokens,
        )
        if request.return_logprobs:
            result.outputs.extend(_output(scores, entropy=False) for scores in output.scores)
        return pb.TrainForwardBackwardResponse(result=result, engine_time=_since(started))

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
        write = self._engine.export_adapter if request.adapter_only else self._engine.save_state
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
    def _engine(self) -> TorchEngine:
        assert self._loaded is not None, "the front loads before it asks for anything else"
        return self._loaded


def _output(scores: SampleScores, *, entropy: bool) -> operation_pb2.SampleOutput:
    return operation_pb2.SampleOutput(
        logprobs=b"" if scores.skipped else pack_floats(scores.logprobs),
        entropy=pack_floats(scores.entropy) if entropy and not scores.skipped else b"",
        skipped=scores.skipped,
    )


def _since(started: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=time.monotonic() - started))
    return duration
