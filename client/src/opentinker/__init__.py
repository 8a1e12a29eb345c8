"""OpenTinker: train language-model agents by reinforcement learning, from plain Python.

    import opentinker as ot

    with ot.connect() as cluster:
        result = ot.fit(env="guess_number", model="smollm2-135m-instruct", steps=40)
        print(ot.run(result.policy, env="guess_number", episodes=50).reward)

Importing this imports next to nothing: each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentinker import errors, sandbox
    from opentinker.connection.cluster import Cluster
    from opentinker.connection.opening import connect
    from opentinker.environments import (
        Action,
        Content,
        Endpoint,
        EndReason,
        Environment,
        Image,
        JointStep,
        LoopEnvironment,
        Message,
        Metric,
        Observation,
        Reward,
        RewardStatus,
        StepResult,
        ToolCall,
        ToolEnvironment,
        ToolError,
        single_turn,
        tool,
    )
    from opentinker.environments.tasks import tasks
    from opentinker.errors import OpenTinkerError
    from opentinker.loop.algorithms import GRPO, ActorCritic, Critic, KLPenalty, Overlong
    from opentinker.loop.evaluation import EvaluationResult
    from opentinker.loop.fit import fit, fit_async
    from opentinker.loop.loggers import Callback
    from opentinker.loop.play import RunResult, evaluate, evaluate_async, run, run_async
    from opentinker.loop.result import FitResult
    from opentinker.loop.settings import Evaluation
    from opentinker.rollout.limits import Limits
    from opentinker.rollout.opponents import Frozen, OpponentPool
    from opentinker.rollout.rollouts import Rollouts, rollouts
    from opentinker.rollout.stragglers import MinViable, WaitAll
    from opentinker.rollout.trajectory import Batch, Group, Trajectory
    from opentinker.sampling.completion import Completion, Delta
    from opentinker.sampling.params import SamplingParams
    from opentinker.sampling.support import Support
    from opentinker.serving.deployments import Deployment, deployments
    from opentinker.serving.played import PlayedEpisode, play, play_async
    from opentinker.serving.recorded import RecordedEpisode, record_episode
    from opentinker.serving.served import ServedModel
    from opentinker.supervised.held_out import HeldOut
    from opentinker.supervised.result import SftResult
    from opentinker.supervised.rows import supervised_samples
    from opentinker.supervised.sft import sft, sft_async
    from opentinker.training import advantages, aggregation, kl, off_policy, reference_losses, schedules
    from opentinker.training.corrections import (
        TIS,
        Decoupled,
        GeometricMask,
        IcePop,
        SequenceMask,
        SequenceTruncate,
    )
    from opentinker.training.episodes import train_samples
    from opentinker.training.kl import AdaptiveKL
    from opentinker.training.losses import Component
    from opentinker.training.policy import Policy
    from opentinker.training.policy_losses import (
        CISPO,
        DPPO,
        DRO,
        GMPO,
        GSPO,
        PPO,
        SAPO,
        ImportanceSampling,
    )
    from opentinker.training.samples import TrainSample, TrainSamples
    from opentinker.training.token_losses import KL, CrossEntropy, Distillation, Entropy, Registered, Value
    from opentinker.training.tuning import AdamW, Full, JobOptions, LoRA, ServerOptions

__version__ = "0.1.0.dev0"

_HOMES = {
    "connection.cluster": ("Cluster",),
    "connection.opening": ("connect",),
    "environments": (
        "Action",
        "Content",
        "EndReason",
        "Endpoint",
        "Environment",
        "Image",
        "JointStep",
        "LoopEnvironment",
        "Message",
        "Metric",
        "Observation",
        "Reward",
        "RewardStatus",
        "StepResult",
        "ToolCall",
        "ToolEnvironment",
        "ToolError",
        "single_turn",
        "tool",
    ),
    "environments.tasks": ("tasks",),
    "errors": ("OpenTinkerError",),
    "loop.algorithms": ("GRPO", "ActorCritic", "Critic", "KLPenalty", "Overlong"),
    "loop.evaluation": ("EvaluationResult",),
    "loop.fit": ("fit", "fit_async"),
    "loop.loggers": ("Callback",),
    "loop.play": ("RunResult", "evaluate", "evaluate_async", "run", "run_async"),
    "loop.result": ("FitResult",),
    "loop.settings": ("Evaluation",),
    "rollout.limits": ("Limits",),
    "rollout.opponents": ("Frozen", "OpponentPool"),
    "rollout.rollouts": ("Rollouts", "rollouts"),
    "rollout.stragglers": ("MinViable", "WaitAll"),
    "rollout.trajectory": ("Batch", "Group", "Trajectory"),
    "sampling.completion": ("Completion", "Delta"),
    "sampling.params": ("SamplingParams",),
    "sampling.support": ("Support",),
    "serving.deployments": ("Deployment", "deployments"),
    "serving.played": ("PlayedEpisode", "play", "play_async"),
    "serving.recorded": ("RecordedEpisode", "record_episode"),
    "serving.served": ("ServedModel",),
    "supervised.held_out": ("HeldOut",),
    "supervised.result": ("SftResult",),
    "supervised.rows": ("supervised_samples",),
    "supervised.sft": ("sft", "sft_async"),
    "training.corrections": (
        "TIS",
        "Decoupled",
        "GeometricMask",
        "IcePop",
        "SequenceMask",
        "SequenceTruncate",
    ),
    "training.kl": ("AdaptiveKL",),
    "training.losses": ("Component",),
    "training.policy_losses": (
        "CISPO",
        "DPPO",
        "DRO",
        "GMPO",
        "GSPO",
        "PPO",
        "SAPO",
        "ImportanceSampling",
    ),
    "training.policy": ("Policy",),
    "training.episodes": ("train_samples",),
    "training.samples": ("TrainSample", "TrainSamples"),
    "training.token_losses": ("KL", "CrossEntropy", "Distillation", "Entropy", "Registered", "Value"),
    "training.tuning": ("AdamW", "Full", "JobOptions", "LoRA", "ServerOptions"),
}
_MODULES = {
    "advantages": "training.advantages",
    "aggregation": "training.aggregation",
    "environments": "environments",
    "errors": "errors",
    "kl": "training.kl",
    "off_policy": "training.off_policy",
    "reference_losses": "training.reference_losses",
    "sandbox": "sandbox",
    "schedules": "training.schedules",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GRPO",
    "GSPO",
    "KL",
    "PPO",
    "SAPO",
    "TIS",
    "Action",
    "ActorCritic",
    "AdamW",
    "AdaptiveKL",
    "Batch",
    "Callback",
    "Cluster",
    "Completion",
    "Component",
    "Content",
    "Critic",
    "CrossEntropy",
    "Decoupled",
    "Delta",
    "Deployment",
    "Distillation",
    "EndReason",
    "Endpoint",
    "Entropy",
    "Environment",
    "Evaluation",
    "EvaluationResult",
    "FitResult",
    "Frozen",
    "Full",
    "GeometricMask",
    "Group",
    "HeldOut",
    "IcePop",
    "Image",
    "ImportanceSampling",
    "JobOptions",
    "JointStep",
    "KLPenalty",
    "Limits",
    "LoRA",
    "LoopEnvironment",
    "Message",
    "Metric",
    "MinViable",
    "Observation",
    "OpenTinkerError",
    "OpponentPool",
    "Overlong",
    "PlayedEpisode",
    "Policy",
    "RecordedEpisode",
    "Registered",
    "Reward",
    "RewardStatus",
    "Rollouts",
    "RunResult",
    "SamplingParams",
    "SequenceMask",
    "SequenceTruncate",
    "ServedModel",
    "ServerOptions",
    "SftResult",
    "StepResult",
    "Support",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "TrainSample",
    "TrainSamples",
    "Trajectory",
    "Value",
    "WaitAll",
    "advantages",
    "aggregation",
    "connect",
    "deployments",
    "errors",
    "evaluate",
    "evaluate_async",
    "fit",
    "fit_async",
    "kl",
    "off_policy",
    "play",
    "play_async",
    "record_episode",
    "reference_losses",
    "rollouts",
    "run",
    "run_async",
    "sandbox",
    "schedules",
    "sft",
    "sft_async",
    "single_turn",
    "supervised_samples",
    "tasks",
    "tool",
    "train_samples",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOME_OF:
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
