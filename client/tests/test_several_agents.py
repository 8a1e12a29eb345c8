"""Several agents in one episode: whose move it is, who is trained on what, and whom they play against."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.tokenizers import files

import opentinker as ot
from opentinker import errors
from opentinker.environments.sources import LocalEnvironment
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.opponents import LATEST
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.scripted import ScriptedAgent
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.completion import Completion, StopReason
from opentinkerapi.runtime.render import ChatTokenizer

CHAT = ChatTokenizer(files())


class Turns(ot.Environment):
    """White and black say numbers in turn, twice each; the higher sum wins. A move of the other costs
    0.25.
    """

    agents: ClassVar[tuple[str, ...]] = ("white", "black")

    def reset(self, *, seed: int, task: dict[str, Any]) -> dict[str, ot.Observation]:
        self.sums = dict.fromkeys(self.agents, 0)
        self.moves = 0
        return {"white": ot.Observation("You begin.")}

    def step(self, actions: dict[str, ot.Action]) -> ot.JointStep:
        ((mover, action),) = actions.items()
        other = "black" if mover == "white" else "white"
        self.sums[mover] += int(action.text)
        self.moves += 1
        if self.moves < 4:
            return ot.JointStep({other: ot.Observation(f"They said {action.text}.")}, {other: -0.25})
        order = np.sign(self.sums["white"] - self.sums["black"])
        return ot.JointStep(
            {"white": ot.Observation("The end.")}, {"white": order, "black": -order}, terminated=True
        )

    def metrics(self) -> dict[str, float]:
        return {"moves": self.moves}


class Together(ot.Environment):
    """Three agents move at once; who says 0 is out, the others play on; rewards are what was said."""

    agents: ClassVar[tuple[str, ...]] = ("a", "b", "c")

    async def reset(self, *, seed: int, task: dict[str, Any]) -> dict[str, ot.Observation]:
        self.rounds = 0
        return {name: ot.Observation(f"You are {name}.") for name in self.agents}

    async def step(self, actions: dict[str, ot.Action]) -> ot.JointStep:
        self.rounds += 1
        said = {name: float(action.text) for name, action in actions.items()}
        left = [name for name, number in said.items() if number]
        out = {name: "TRUNCATED" for name, number in said.items() if not number}
        if self.rounds == 3 or not left:
            return ot.JointStep(rewards=said, ended=out, terminated=True)
        return ot.JointStep({name: ot.Observation("Again.") for name in left}, said, ended=out)


class Speaker:
    """Says the same again and again."""

    def __init__(self, *words: str, wait: bool = False) -> None:
        self.words = words
        self.prompts: list[list[int]] = []
        self.wait = wait

    async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
        self.prompts.append(list(prompt))
        if self.wait:
            await asyncio.sleep(30)
        text = self.words[turn % len(self.words)]
        ids = (*CHAT.encode(text), CHAT.eos_ids[0])
        return Completion(0, ids, np.full(len(ids), -0.5, np.float32), StopReason.END, text, seed=0)


def voice(agent: str, speaker: Any, limits: Limits, **options: Any) -> AgentLoop:
    return AgentLoop(
        Renderer(CHAT),
        speaker,
        group=f"g/{agent}",
        member=0,
        version=1,
        limits=limits,
        max_tokens=None,
        context_tokens=10_000,
        temperature=1.0,
        agent=agent,
        policy=options.pop("policy", "policy"),
        **options,
    )


async def play(
    env: type[ot.Environment], limits: Limits | None = None, **players: Any
) -> dict[str, Trajectory]:
    (session,) = await LocalEnvironment(env).open_group(task={}, seed=0, size=1)
    limits = limits or Limits()
    seats = {
        agent: voice(agent, player, limits) if isinstance(player, Speaker) else player
        for agent, player in players.items()
    }
    episode = EpisodeLoop(session, seats, limits)
    await episode.begin()
    return {each.agent: each for each in await episode.play()}


def said(trajectory: Trajectory) -> list[str]:
    return [f"{message.role}: {message.content.text}" for message in trajectory.messages]


async def test_in_turn_each_hears_the_other_and_has_its_own_rewards() -> None:
    white, black = Speaker("7", "1"), Speaker("4", "3")
    played = await play(Turns, white=white, black=black)
    assert said(played["white"]) == [
        "user: You begin.", "assistant: 7", "user: They said 4.", "assistant: 1", "user: The end.",
    ]  # fmt: skip
    assert said(played["black"]) == [
        "user: They said 7.", "assistant: 4", "user: They said 1.", "assistant: 3",
    ]  # fmt: skip
    assert [turn.text for turn in played["white"].turns] == ["7", "1"]
    # What the other's move cost stands at one's own last turn; black's first came before it had any.
    assert [turn.reward for turn in played["white"].turns] == [-0.25, 1.0]
    assert [turn.reward for turn in played["black"].turns] == [-0.25, -1.0]
    assert (played["white"].reward.value, played["black"].reward.value) == (0.75, -1.5)
    assert {each.end_reason for each in played.values()} == {ot.EndReason.TERMINATED}
    for name, speaker in (("white", white), ("black", black)):
        (segment,) = played[name].segments
        assert list(segment.token_ids[: len(speaker.prompts[1])]) == speaker.prompts[1]
        spoken = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
        assert CHAT.decode(spoken) == "".join(turn.text for turn in played[name].turns)
    assert played["white"].opponents["black"].reward == -1.5


async def test_at_once_and_one_ends_before_the_others() -> None:
    played = await play(Together, a=Speaker("1"), b=Speaker("2", "0"), c=Speaker("3"))
    assert {name: len(each.turns) for name, each in played.items()} == {"a": 3, "b": 2, "c": 3}
    assert {name: each.reward.value for name, each in played.items()} == {"a": 3.0, "b": 2.0, "c": 9.0}
    assert {name: each.end_reason.value for name, each in played.items()} == {
        "a": "TERMINATED",
        "b": "TRUNCATED",
        "c": "TERMINATED",
    }


async def test_those_who_move_at_once_do_not_wait_for_each_other() -> None:
    meeting = asyncio.Barrier(3)

    class Meets(Speaker):
        async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
            async with asyncio.timeout(5):
                await meeting.wait()
            return await super().__call__(turn, prompt, room)

    played = await play(Together, a=Meets("1"), b=Meets("1"), c=Meets("1"))
    assert all(len(each.turns) == 3 for each in played.values())


async def test_a_limit_ends_it_for_one_and_cuts_it_for_the_other() -> None:
    played = await play(Turns, Limits(turns=1), white=Speaker("7"), black=Speaker("4"))
    assert {name: each.end_reason for name, each in played.items()} == {
        "white": ot.EndReason.TURN_LIMIT,
        "black": ot.EndReason.TRUNCATED,
    }
    assert all(len(each.turns) == 1 and each.counts for each in played.values())


async def test_what_the_infrastructure_ends_counts_for_nobody() -> None:
    """Also not for who had ended well before."""

    class Breaks(Together):
        async def step(self, actions: dict[str, ot.Action]) -> ot.JointStep:
            if self.rounds:
                raise RuntimeError("the board fell over")
            return await super().step(actions)

    played = await play(Breaks, a=Speaker("1"), b=Speaker("0"), c=Speaker("3"))
    assert {each.end_reason for each in played.values()} == {ot.EndReason.ENV_CRASH}
    assert all(each.reward.value is None and not each.counts for each in played.values())

    class Fails(Speaker):
        async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
            raise errors.InternalError("boom", reason="INTERNAL")

    played = await play(Turns, white=Speaker("1"), black=Fails("1"))
    assert {each.end_reason for each in played.values()} == {ot.EndReason.CANCELLED}
    assert not any(each.counts for each in played.values())
    played = await play(Turns, Limits(wall_clock_s=0.1), white=Speaker("1"), black=Speaker("1", wait=True))
    assert {each.end_reason for each in played.values()} == {ot.EndReason.EPISODE_TIMEOUT}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stranger", "there is no agent 'grey'"),
        ("late", "for whom the episode is over"),
        ("nobody", "must say whose move it is"),
        ("single", "must return a JointStep, not StepResult"),
        ("nan", "must be finite"),
    ],
)
async def test_what_the_environment_may_not_do(fault: str, message: str) -> None:
    class Wrong(Turns):
        def step(self, actions: dict[str, ot.Action]) -> Any:
            match fault:
                case "stranger":
                    return ot.JointStep({"grey": ot.Observation("?")})
                case "late":
                    return ot.JointStep({"black": ot.Observation("?")}, ended={"black": "TERMINATED"})
                case "nobody":
                    return ot.JointStep({})
                case "single":
                    return ot.StepResult("?")
            return ot.JointStep({"black": ot.Observation("?")}, {"white": float("nan")})

    played = await play(Wrong, white=Speaker("7"), black=Speaker("4"))
    assert played["white"].end_reason is ot.EndReason.ENV_CRASH
    assert message in played["white"].error


async def test_scripts_play_and_are_not_recorded() -> None:
    def higher(observation: ot.Observation, rng: random.Random) -> str:
        return str(int(observation.text.removeprefix("They said ").removesuffix(".")) + 1)

    class Counts:
        """Made anew for each episode."""

        def __init__(self) -> None:
            self.turn = 0

        async def __call__(self, observation: ot.Observation, rng: random.Random) -> ot.Action:
            self.turn += 1
            return ot.Action(str(self.turn))

    for script, reward in ((higher, -1.25), (Counts, 0.75)):
        for _ in range(2):
            played = await play(Turns, white=Speaker("3"), black=ScriptedAgent("black", script, seed=1))
            assert set(played) == {"white"}
            assert played["white"].reward.value == reward
            assert played["white"].opponents["black"].policy == script.__name__


async def test_what_a_script_does_wrong_is_no_reward() -> None:
    def raises(observation: ot.Observation, rng: random.Random) -> str:
        raise ValueError("no idea")

    def sleeps(observation: ot.Observation, rng: random.Random) -> str:
        time.sleep(0.5)
        return "1"

    cases = {
        raises: (ot.EndReason.ENV_CRASH, "ValueError: no idea"),
        sleeps: (ot.EndReason.STEP_TIMEOUT, "did not answer within 0.1 s"),
        lambda observation, rng: 7: (ot.EndReason.ENV_CRASH, "must give a text or an Action, not int"),
    }
    for script, (reason, message) in cases.items():
        black = ScriptedAgent("black", script, seed=1, timeout_s=0.1)  # type: ignore[arg-type]
        played = await play(Turns, white=Speaker("3"), black=black)
        assert played["white"].end_reason is reason
        assert message in played["white"].error
        assert played["white"].reward.value is None


# --- fit, run, evaluate ---------------------------------------------------------------------------------


def train(doubles: World, tmp_path: Path, env: type[ot.Environment] = Turns, **options: Any) -> ot.FitResult:
    defaults: dict[str, Any] = {
        "steps": 3,
        "groups_per_step": 2,
        "run_dir": tmp_path / "run",
        "algorithm": ot.GRPO(group_size=4),
    }
    return ot.fit(env, "tiny", **{**defaults, **options})


def lowest(observation: ot.Observation, rng: random.Random) -> str:
    return "0"


def trained_rows(doubles: World, policy: str) -> list[list[str]]:
    """What a policy was trained on, by ForwardBackward: names of the rows' groups."""
    return [
        [row.group_id for chunk in messages[1:] for row in chunk.samples]
        for name, method, messages in doubles.trainer.ran
        if name == policy and method == "ForwardBackward"
    ]


def test_self_play_trains_one_policy_on_both_sides(doubles: World, tmp_path: Path) -> None:
    result = train(doubles, tmp_path)
    assert list(result.policies.values()) == [result.policy]
    (first, *_) = trained_rows(doubles, result.policy.name)
    sides = {name.rsplit("/", 1)[1] for name in first}
    assert sides == {"white", "black"}
    assert len(first) == 2 * 4 * 2  # groups, members, agents
    row = result.metrics[0]
    # Each side pays 0.25 for each of the other's moves that was not the last: zero-sum but for that.
    assert row["critic/score/mean"] == pytest.approx((-0.25 - 0.5) / 2)
    assert row["agents/white/score/mean"] + row["agents/black/score/mean"] == pytest.approx(-0.75)
    assert row["env/moves/mean"] == 4.0
    assert row["group/count"] == 4.0


def test_a_side_is_compared_with_itself(doubles: World, tmp_path: Path) -> None:
    """Black always loses: that teaches neither black nor white, whatever the other side got."""

    class Rigged(Turns):
        def step(self, actions: dict[str, ot.Action]) -> ot.JointStep:
            self.moves += 1
            if self.moves == 2:
                return ot.JointStep(rewards={"white": 1.0, "black": -1.0}, terminated=True)
            return ot.JointStep({"black": ot.Observation("Your move.")})

    result = train(doubles, tmp_path, Rigged, steps=1)
    assert result.metrics[0]["group/zero_variance_fraction"] == 1.0
    assert result.steps == 0


def test_two_policies_are_trained_at_once_each_on_its_own(doubles: World, tmp_path: Path) -> None:
    result = train(
        doubles,
        tmp_path,
        agents={"white": "attacker", "black": "defender"},
        checkpoint_every=2,
        evaluation=ot.Evaluation(tasks=2, split="train", agents={"black": lowest}),
    )
    assert list(result.policies) == ["attacker", "defender"]
    attacker, defender = result.policies.values()
    assert result.policy is attacker
    assert attacker.job is defender.job
    assert attacker.name != defender.name
    for policy, side in ((attacker, "white"), (defender, "black")):
        rows = [name for names in trained_rows(doubles, policy.name) for name in names]
        assert rows
        assert {name.rsplit("/", 1)[1] for name in rows} == {side}
        assert policy.version == len(trained_rows(doubles, policy.name))
    row = result.metrics[0]
    assert row["attacker/critic/score/mean"] == row["agents/white/score/mean"]
    assert row["defender/actor/grad_norm"] >= 0
    requests = doubles.inference.requests
    refs = [request.model.policy_version for request in requests]
    seen = {(ref.policy, ref.version) for ref in refs}
    assert {(policy.name, version) for policy in (attacker, defender) for version in (0, 1)} <= seen
    assert len({request.request_id for request in requests}) == len(requests)
    # Against nought the attacker wins or, with two noughts, draws; and only its own games are measured.
    assert all(result_.reward > 0 for _, result_ in result.evaluations)
    state = json.loads(doubles.scheduler.loop_states[0].state)
    assert set(state["policies"]) == {"attacker", "defender"}


def test_no_two_agents_draw_from_the_same_seed(doubles: World, tmp_path: Path) -> None:
    train(doubles, tmp_path, Together)
    requests = doubles.inference.requests
    seeds = [request.params.seed + index for request in requests for index in range(request.n)]
    assert len(seeds) > 3 * 2 * 4 * 3
    assert len(set(seeds)) == len(seeds)


def test_runs_with_several_agents_can_be_repeated(doubles: World, tmp_path: Path) -> None:
    def weights(seed: int, agents: dict[str, Any] | None) -> list[str]:
        result = train(doubles, tmp_path / str(seed), seed=seed, agents=agents)
        return [doubles.trainer.policies[policy.name].weights for policy in result.policies.values()]

    two = {"white": "attacker", "black": "defender"}
    assert weights(1, two) == weights(1, two) != weights(2, two)
    pool = {"black": ot.OpponentPool(latest=0.5)}
    assert weights(1, pool) == weights(1, {"black": ot.OpponentPool(latest=0.5)})


def test_frozen_opponents_stay_at_their_version(doubles: World, tmp_path: Path) -> None:
    result = train(doubles, tmp_path, agents={"black": ot.Frozen(version=0)}, steps=4)
    assert result.version >= 1
    rows = [name for names in trained_rows(doubles, result.policy.name) for name in names]
    assert {name.rsplit("/", 1)[1] for name in rows} == {"white"}
    # White opens and is asked for by the group; black answers each member.
    versions: dict[bool, set[int]] = {True: set(), False: set()}
    for request in doubles.inference.requests:
        versions[b"begin" in doubles.inference.tokenizer.decode(ids(request)).encode()].add(
            request.model.policy_version.version
        )
    assert versions[True] >= {0, 1}
    assert versions[False] == {0}
    assert result.metrics[0]["agents/white/score/mean"]
    assert "agents/black/score/mean" not in result.metrics[0]


def ids(request: Any) -> list[int]:
    from opentinkerapi.runtime.tensors import unpack_ids

    return list(unpack_ids(request.prompt.chunks[0].tokens.token_ids))


def test_run_and_evaluate_take_the_same_mapping(doubles: World) -> None:
    policy = doubles.cluster.create_policy("tiny").result()
    other = doubles.cluster.create_policy("tiny", beside=policy).result()
    played = ot.run(policy, Turns, episodes=6, agents={"black": lowest})
    assert played.reward > 0
    assert {each.agent for each in played.trajectories} == {"white"}
    assert played.trajectories[0].opponents["black"].policy == "lowest"
    both = ot.run(policy, Turns, episodes=6)
    assert {each.agent for each in both.trajectories} == {"white", "black"}
    against = ot.evaluate(policy, Turns, tasks=3, samples=2, agents={"white": other})
    (first, *_) = (each for group in against.groups for each in group.trajectories)
    assert (first.agent, first.opponents["white"].policy) == ("black", f"{other.name}@0")
    again = ot.evaluate(policy, Turns, tasks=3, samples=2, agents={"white": ot.Frozen(other, 0)})
    assert again.reward == against.reward


def test_loops_of_ones_own_record_every_policy_they_name(doubles: World) -> None:
    policy = doubles.cluster.create_policy("tiny").result()
    other = doubles.cluster.create_policy("tiny", beside=policy).result()

    async def play_one() -> ot.Batch:
        async for batch in ot.rollouts(policy, Turns, groups=2, group_size=2, agents={"black": other}):
            return batch
        raise AssertionError

    batch = asyncio.run(play_one())
    own, theirs = batch.of_policy("policy"), batch.of_policy(other.name)
    assert {each.agent for each in own} == {"white"}
    assert {each.agent for each in theirs} == {"black"}
    assert len(list(own)) + len(list(theirs)) == len(list(batch)) == 8
    assert len(ot.train_samples(theirs)) == 4


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ({"grey": lowest}, "Turns has no agent 'grey'; its agents: white, black"),
        ({"white": lowest, "black": ot.Frozen()}, "nothing would be recorded"),
        ({"white": "one", "black": ot.Frozen("two")}, "no policy 'two' is trained here; there is one"),
        ({"white": 7}, "must be a policy, ot.Frozen, ot.OpponentPool or a function"),
    ],
)
def test_casts_that_make_no_sense_are_refused(
    doubles: World, tmp_path: Path, agents: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message) as caught:
        train(doubles, tmp_path, agents=agents)
    assert (caught.value.field or "").startswith("agents")
    assert not doubles.scheduler.jobs


def test_the_cast_of_an_evaluation_is_checked_at_once(doubles: World, tmp_path: Path) -> None:
    for agents, message in (
        ({"grey": lowest}, "no agent 'grey'"),
        ({"white": lowest, "black": lowest}, "nothing would be recorded"),
        ({"white": "stranger"}, "no policy 'stranger' is trained here"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            train(doubles, tmp_path, evaluation=ot.Evaluation(agents=agents))
    assert not doubles.scheduler.jobs


def test_an_agent_of_a_plain_environment_may_not_be_named(doubles: World, tmp_path: Path) -> None:
    plain = ot.single_turn([{"prompt": "?"}], reward=lambda answer, task: 1.0, name="plain")
    with pytest.raises(errors.InvalidArgument, match="plain has no agent 'white'; its agents: agent"):
        train(doubles, tmp_path, plain, agents={"white": lowest})


# --- pools ----------------------------------------------------------------------------------------------


def draws(pool: ot.OpponentPool, count: int = 4000) -> dict[Any, float]:
    drawn = [pool.draw(np.random.default_rng(seed)) for seed in range(count)]
    return {each: drawn.count(each) / count for each in set(drawn)}


def test_a_pool_draws_those_who_win() -> None:
    pool = ot.OpponentPool(latest=0.0)
    for version in range(3):
        pool.offer(version)
    assert set(draws(pool)) == {0, 1, 2}
    for _ in range(50):
        pool.record("policy@0", 1.0)
        pool.record("policy@1", 0.5)
        pool.record("policy@2", 0.0)
    shares = draws(pool)
    assert shares[2] > 0.7
    assert 0.15 < shares[1] < 0.25
    assert shares.get(0, 0.0) < 0.01
    assert pool.rates["0"] > 0.95
    even = ot.OpponentPool(latest=0.0, weighting="even")
    even.restore(pool.state())
    assert draws(even)[1] > 0.8
    assert even.rates == pool.rates
    # Chances change: an opponent that was beaten and wins now is drawn again.
    for _ in range(200):
        pool.record("policy@0", 0.0)
    assert draws(pool)[0] > 0.3


def test_a_pool_keeps_to_its_size_and_never_drops_the_newest() -> None:
    pool = ot.OpponentPool(latest=0.25, size=2, every=2)
    for version in (0, 1, 2, 2):
        pool.offer(version)
    assert pool.state()["versions"] == [0, 2]  # every second one, once
    for _ in range(20):
        pool.record("policy@0", 0.0)
        pool.record("policy@2", 0.1)
    pool.offer(4)  # nothing is known of it, and the others win
    assert pool.state()["versions"] == [0, 4]
    assert draws(pool)[LATEST] == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"every": 0}, {"weighting": "wild"}, {"latest": 1.5}, {"latest": -0.1}]
)
def test_options_of_a_pool_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        ot.OpponentPool(**options)
    assert caught.value.field == next(iter(options))


def test_a_league_meets_past_versions_and_learns_of_results(doubles: World, tmp_path: Path) -> None:
    pool = ot.OpponentPool(latest=0.0, weighting="uniform", others=(lowest,))
    result = train(doubles, tmp_path, agents={"black": pool}, steps=6, checkpoint_every=6)
    assert result.version >= 3
    met = set(pool.rates)
    assert "lowest" in met
    versions = {str(version) for version in range(result.version + 1)}
    assert met - {"lowest"} <= versions
    assert len(met) >= 3
    assert pool.rates["lowest"] > 0.5
    before = pool.rates
    ot.run(result.policy, Turns, episodes=4, agents={"black": pool})
    assert pool.rates == before  # measuring is not playing
    state = json.loads(doubles.scheduler.loop_states[0].state)
    assert state["pools"]["black"] == pool.state()
