"""What an environment host counts: episodes and their steps, by environment."""

from collections import Counter
from collections.abc import Mapping

from opentinker_env_host.domain.host import EnvironmentHost
from opentinker_env_host.ports import FailureSink
from opentinker_kit.metrics import Labels, Metrics


class CountedFailures:
    """A sink that counts what passes it."""

    def __init__(self, sink: FailureSink) -> None:
        self._sink = sink
        self.failed: Counter[Labels] = Counter()

    async def episode_failed(self, episode: str, environment: str, reason: str) -> None:
        self.failed[environment, reason] += 1
        await self._sink.episode_failed(episode, environment, reason)


def show(metrics: Metrics, host: EnvironmentHost, failures: CountedFailures) -> None:
    """Have what the host counts shown."""
    environment: Labels = ("environment",)

    def by_environment(numbers: Mapping[str, float]) -> dict[Labels, float]:
        return {(name,): number for name, number in numbers.items()}

    metrics.read(
        "opentinker_env_host_episodes_opened",
        "Episodes that were opened.",
        lambda: by_environment(host.opened),
        environment,
        grows=True,
    )
    metrics.read(
        "opentinker_env_host_steps",
        "Steps that were played; those that were played again after a crash are left out.",
        lambda: by_environment(host.steps),
        environment,
        grows=True,
    )
    metrics.read(
        "opentinker_env_host_environment_seconds",
        "Time inside environments in these steps.",
        lambda: by_environment(host.env_seconds),
        environment,
        grows=True,
    )
    metrics.read(
        "opentinker_env_host_environment_episodes",
        "Episodes that are open, by environment.",
        lambda: by_environment(host.open_by_environment()),
        environment,
    )
    metrics.read(
        "opentinker_env_host_workers",
        "Worker processes that live.",
        lambda: by_environment(host.workers_by_environment()),
        environment,
    )
    metrics.read(
        "opentinker_env_host_episodes_failed",
        "Episodes that infrastructure ended.",
        lambda: failures.failed,
        ("environment", "reason"),
        grows=True,
    )
    metrics.read("opentinker_env_host_episodes", "Episodes that are open.", lambda: {(): host.open_episodes})
