"""The no-op engine's process: answers at once with results of the right shape, all zeros.

For tests and benchmarks of everything around an engine. It trains nothing, is chosen only by `engine: noop`,
and says so in GetCapabilities.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineServer, Handler
from opentinker_trainer import wire
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats
from opentinkerapi.trainer.v1 import operation_pb2

_WIDTH = 8
_LAYER = "model.layers.0.self_attn.q_proj"


class NoopHandlers:
    """Counts steps, and nothing else."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._open: dict[str, pb.TrainBeginRequest] = {}
        self._tunings: dict[str, policy_pb2.Tuning] = {}

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

    def load(self, _request: pb.TrainLoadRequest) -> pb.TrainLoadResponse:
        layer = pb.LinearLayers(name="q_proj", count=1, in_features=_WIDTH, out_features=_WIDTH)
        return pb.TrainLoadResponse(
            vocab_size=2**31 - 1,
            context_tokens=2**20,
            linear_layers=[layer],
            weight_count=_WIDTH * _WIDTH,
            output_layer=pb.LinearLayers(name="lm_head", count=1, in_features=_WIDTH, out_features=_WIDTH),
            activation_checkpointing=True,
        )

    def create_policy(self, request: pb.TrainCreatePolicyRequest) -> pb.TrainCreatePolicyResponse:
        self._steps[request.policy] = 0
        self._tunings[request.policy] = request.tuning
        return pb.TrainCreatePolicyResponse()

    def drop_policy(self, request: pb.TrainDropPolicyRequest) -> pb.TrainDropPolicyResponse:
        self._steps.pop(request.policy, None)
        return pb.TrainDropPolicyResponse()

    def _check(self, policy: str) -> None:
        if policy not in self._steps:
            raise ServiceError(Reason.POLICY_NOT_FOUND, f"the engine does not hold {policy}")

    def begin(self, request: pb.TrainBeginRequest) -> pb.TrainBeginResponse:
        policy = request.forward.policy or request.forward_backward.policy
        self._check(policy)
        self._open[policy] = request
        return pb.TrainBeginResponse(slices=1)

    def advance(self, request: pb.TrainAdvanceRequest) -> pb.TrainAdvanceResponse:
        self._check(request.policy)
        opened = self._open.pop(request.policy)
        if opened.WhichOneof("pass") == "forward":
            return pb.TrainAdvanceResponse(forward=self.forward(opened.forward))
        return pb.TrainAdvanceResponse(forward_backward=self.forward_backward(opened.forward_backward))

    def forward(self, request: pb.TrainForwardRequest) -> pb.TrainForwardResponse:
        self._check(request.policy)
        outputs = [_zeros(len(sample.loss_mask)) for sample in request.samples]
        if request.return_values:
            for output in outputs:
                output.values = output.logprobs
        return pb.TrainForwardResponse(result=operation_pb2.ForwardResult(outputs=outputs))

    def forward_backward(self, request: pb.TrainForwardBackwardRequest) -> pb.TrainForwardBackwardResponse:
        self._check(request.policy)
        components = wire.components_of(request.losses)
        count = sum(sum(sample.loss_mask) for sample in request.samples)
        metrics = {f"loss/{component.name}": (0.0, float(count)) for component in components}
        result = operation_pb2.ForwardBackwardResult(
            components=[
                operation_pb2.ComponentSum(component=component.name, loss_sum=0.0, weight=count)
                for component in components
            ],
            metrics=wire.metric_messages(metrics),
            trained_tokens=count,
        )
        if request.return_logprobs:
            result.outputs.extend(_zeros(len(sample.loss_mask)) for sample in request.samples)
        return pb.TrainForwardBackwardResponse(result=result)

    def optim_step(self, request: pb.TrainOptimStepRequest) -> pb.TrainOptimStepResponse:
        self._check(request.policy)
        self._steps[request.policy] += 1
        result = operation_pb2.OptimStepResult(step=self._steps[request.policy])
        return pb.TrainOptimStepResponse(result=result)

    def save(self, request: pb.TrainSaveRequest) -> pb.TrainSaveResponse:
        self._check(request.policy)
        directory = Path(request.directory)
        directory.mkdir(parents=True, exist_ok=True)
        step = self._steps[request.policy]
        tuning = self._tunings[request.policy]
        write = _write_model if tuning.WhichOneof("kind") == "full" else _write_adapter
        files = write(directory, tuning, step)
        if not request.adapter_only:
            (directory / "engine.json").write_text(json.dumps({"steps": step}))
            files.append("engine.json")
        return pb.TrainSaveResponse(files=files)

    def restore(self, request: pb.TrainRestoreRequest) -> pb.TrainRestoreResponse:
        self._check(request.policy)
        state = json.loads((Path(request.directory) / "engine.json").read_text())
        self._steps[request.policy] = 0 if request.weights_only else int(state["steps"])
        return pb.TrainRestoreResponse(step=self._steps[request.policy])


def _write_adapter(directory: Path, tuning: policy_pb2.Tuning, step: int) -> list[str]:
    # The step is in the weights, so that versions differ like real ones.
    lora = tuning.lora
    weights = {
        f"base_model.model.{_LAYER}.lora_A.weight": np.full((lora.rank, _WIDTH), step, np.float32),
        f"base_model.model.{_LAYER}.lora_B.weight": np.zeros((_WIDTH, lora.rank), np.float32),
    }
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return ["adapter_model.safetensors", "adapter_config.json"]


def _write_model(directory: Path, _tuning: policy_pb2.Tuning, step: int) -> list[str]:
    weights = {f"{_LAYER}.weight": np.full((_WIDTH, _WIDTH), step, np.float32)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "noop", "dtype": "float32"}))
    return ["model.safetensors", "config.json"]


def _zeros(length: int) -> operation_pb2.SampleOutput:
    return operation_pb2.SampleOutput(logprobs=pack_floats(np.zeros(length, np.float32)))


def main() -> None:
    EngineServer(NoopHandlers().table()).run()


if __name__ == "__main__":
    main()
