"""Who plays the agents of an episode: policies that are trained, frozen versions, scripts, a pool of
opponents.

    agents={"white": "learner", "black": ot.Frozen("learner", version=0)}

An agent that is not named is played by the rollout's own policy, so that without a word all of them are:
that is self-play.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opentinker import errors
from opentinker.environments.base import EnvironmentInfo
from opentinker.environments.types import AGENT
from opentinker.rollout.opponents import LATEST, Frozen, OpponentPool
from opentinker.rollout.renderer import Renderer, make_renderer
from opentinker.rollout.scripted import Script, script_name
from opentinker.rollout.trajectory import Batch
from opentinker.sampling import identity
from opentinker.sampling.sampler import Sampler

if TYPE_CHECKING:
    from opentinker.training.policy import Policy

MAIN = "policy"
"""Name of a run's only policy."""


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A model that speaks for an agent, at one version. `trained`: what it says is recorded."""

    policy: str
    sampler: Sampler
    renderer: Renderer
    context_tokens: int
    version: int
    trained: bool
    owner: "Policy"


Cast = Mapping[str, "Voice | Script | type"]
"""Of one group, by agent, in the order that the environment names them."""


@dataclass(frozen=True, slots=True)
class _Model:
    policy: "Policy"
    renderer: Renderer
    context_tokens: int


class Casting:
    """Casts groups. `policies` are those of the run by name, the first of them its own."""

    def __init__(
        self, policies: Mapping[str, "Policy"], agents: Mapping[str, Any] | None, *, seed: int
    ) -> None:
        self._policies = dict(policies)
        self._main = next(iter(self._policies))
        self._given = {name: self._spec(name, player) for name, player in (agents or {}).items()}
        self._seed = seed
        self._models: dict[str, _Model] = {}
        self._names: Sequence[str] = (AGENT,)

    async def prepare(self, environment: EnvironmentInfo) -> None:
        """Learn who there is, and what the models need. InvalidArgument for names that are not there."""
        check_cast(self._given, environment.agents, environment.name, self._main)
        self._names = environment.agents
        for name, policy in self._policies.items():
            capabilities = await policy.sampler.capabilities()
            renderer = make_renderer(await policy.tokenizer(), policy.renderer, environment.tools)
            self._models[name] = _Model(policy, renderer, int(capabilities.context_tokens))

    def versions(self, main: int | None, *, league: bool) -> dict[str, int]:
        """What each policy plays a batch at. Pools of a league learn of versions here."""
        versions = {name: policy.version for name, policy in self._policies.items()}
        if main is not None:
            versions[self._main] = main
        for pool in self.pools.values() if league else ():
            pool.offer(versions[pool.policy or self._main])
        return versions

    def version(self, versions: Mapping[str, int]) -> int:
        """Of these, the rollout's own policy's."""
        return versions[self._main]

    def cast(self, ordinal: int, versions: Mapping[str, int]) -> Cast:
        """Who plays the group of an ordinal. The members of a group have the same opponents."""
        return {name: self._player(name, ordinal, versions) for name in self._names}

    def record(self, batch: Batch) -> None:
        """Tell pools how their opponents did."""
        for trajectory in batch:
            for agent, opponent in trajectory.opponents.items():
                pool = self._given.get(agent)
                value = trajectory.reward.value if trajectory.counts else None
                if isinstance(pool, OpponentPool) and value is not None and opponent.reward is not None:
                    pool.record(opponent.policy, 0.5 + 0.5 * float(np.sign(value - opponent.reward)))

    @property
    def renderer(self) -> str:
        """Name of the format that the rollout's own policy speaks; "" before anything was played."""
        return self._models[self._main].renderer.name if self._models else ""

    @property
    def pools(self) -> dict[str, OpponentPool]:
        """The pools by agent."""
        return {name: each for name, each in self._given.items() if isinstance(each, OpponentPool)}

    def _spec(self, agent: str, player: Any) -> Any:
        """A player as it is kept: a policy by its name in the run."""
        field = f"agents[{agent!r}]"
        if isinstance(player, Frozen):
            return Frozen(self._name(player.policy, field), player.version)
        if isinstance(player, OpponentPool):
            self._name(player.policy, field)
            for other in player.others:
                self._spec(agent, other)
            return player
        if isinstance(player, str) or hasattr(player, "sampler"):
            return self._name(player, field)
        check_player(player, field)
        return player

    def _name(self, policy: Any, field: str) -> str:
        """The name of a policy, which is added to those of the run where it is given as an object."""
        if isinstance(policy, str):
            if policy and policy not in self._policies:
                text = f"no policy {policy!r} here; there is {', '.join(self._policies)}"
                raise errors.invalid(field, text)
            return policy or self._main
        for name, known in self._policies.items():
            if known is policy:
                return name
        self._policies[policy.name] = policy
        return str(policy.name)

    def _player(self, agent: str, ordinal: int, versions: Mapping[str, int]) -> "Voice | Script | type":
        spec = self._given.get(agent, self._main)
        if isinstance(spec, OpponentPool):
            drawn = spec.draw(np.random.default_rng(identity.seed(self._seed, "opponent", agent, ordinal)))
            name = spec.policy or self._main
            if drawn == LATEST:
                drawn = Frozen(name, versions[name])
            spec = Frozen(name, drawn) if isinstance(drawn, int) else self._spec(agent, drawn)
        if isinstance(spec, Frozen):
            return self._voice(str(spec.policy), spec.version, f"{spec.policy}@{spec.version}", trained=False)
        if isinstance(spec, str):
            return self._voice(spec, versions[spec], spec, trained=True)
        script: Script | type = spec
        return script

    def _voice(self, name: str, version: int, label: str, *, trained: bool) -> Voice:
        model = self._models[name]
        sampler = model.policy.sampler
        return Voice(label, sampler, model.renderer, model.context_tokens, version, trained, model.policy)


def check_player(player: Any, field: str) -> None:
    """InvalidArgument for what can play nobody."""
    known = isinstance(player, str | Frozen | OpponentPool) or hasattr(player, "sampler") or callable(player)
    if not known:
        text = f"must be a policy, ot.Frozen, ot.OpponentPool or a function, not {player!r}"
        raise errors.invalid(field, text)


def check_cast(given: Mapping[str, Any], agents: Sequence[str], environment: str, main: str) -> None:
    """InvalidArgument for agents that are not there, and where nobody's play would be recorded."""
    if unknown := sorted(set(given) - set(agents)):
        text = f"{environment} has no agent {unknown[0]!r}; its agents: {', '.join(agents)}"
        raise errors.invalid("agents", text)
    players = [given.get(name, main) for name in agents]
    if not any(isinstance(player, str) or hasattr(player, "sampler") for player in players):
        raise errors.invalid("agents", "all agents are played by opponents: nothing would be recorded")


def describe(player: Any) -> str:
    """A player in a few words, for the record of a run."""
    if isinstance(player, str):
        return player
    if isinstance(player, Frozen):
        return f"{getattr(player.policy, 'name', player.policy) or MAIN}@{player.version}"
    if isinstance(player, OpponentPool):
        return repr(player)
    return getattr(player, "name", None) or script_name(player)
