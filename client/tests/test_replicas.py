"""Several inference servers for one policy: who gets which request, and what happens when one dies."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.inference import InferenceDouble
from hypothesis import given, settings
from hypothesis import strategies as st

import opentinker as ot
from opentinker import errors
from opentinker.connection import jobs
from opentinker.connection.replicas import MAX_CONVERSATIONS, Replicas
from opentinker.environments.builtin.guess_number import GuessNumber
from opentinker.sampling import sampler
from opentinker_kit.testing import wait_until
from opentinkerapi.scheduler.v1 import job_pb2


@dataclass(frozen=True)
class Way:
    """A link as far as routing knows it."""

    address: str
    attempt: int = 1


A, B, C = Way("a"), Way("b"), Way("c")


def of(*ways: Way) -> Replicas[Way]:
    replicas: Replicas[Way] = Replicas()
    replicas.adopt(ways)
    return replicas


def test_a_request_goes_where_least_is_in_flight() -> None:
    replicas = of(A, B)
    with replicas.using(A, 8):
        assert [replicas.pick() for _ in range(3)] == [B, B, B]
        with replicas.using(B, 9):
            assert replicas.pick() == A
    assert {replicas.pick(), replicas.pick()} == {A, B}


def test_a_conversation_stays_whatever_the_load() -> None:
    replicas = of(A, B)
    home = replicas.pick("chat")
    with replicas.using(home, 100):
        assert replicas.pick("chat") == home
        assert replicas.pick("other") != home
    # Where it went when its server was lost, it stays: what was said is there now.
    assert replicas.lost(home)
    moved = replicas.pick("chat")
    assert moved != home
    replicas.answered(home)
    assert replicas.pick("chat") == moved


def test_who_does_not_answer_is_passed_over_while_there_is_another() -> None:
    replicas = of(A, B)
    assert replicas.lost(A)
    assert {replicas.pick() for _ in range(4)} == {B}
    assert (replicas.links, replicas.suspects) == ([B], [A])
    assert not replicas.lost(B)
    assert {replicas.pick() for _ in range(4)} == {A, B}
    # Told of the same servers again, it trusts them no more than before; one of a new attempt is a new one.
    replicas.adopt([A, Way("b", 2)])
    assert replicas.links == [Way("b", 2)]


def test_conversations_are_remembered_up_to_a_bound() -> None:
    replicas = of(A, B)
    for number in range(MAX_CONVERSATIONS + 100):
        replicas.pick(str(number))
    assert len(replicas._homes) == MAX_CONVERSATIONS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["begin", "end", "lose", "answer", "replace"]), max_size=60), st.randoms())
def test_load_is_even_and_nobody_asks_the_dead(steps: list[str], random: Any) -> None:
    ways, open_calls, generation = [A, B, C], [], 1
    replicas = of(*ways)
    dead: set[Way] = set()
    for step in steps:
        if step == "begin":
            way = replicas.pick(random.choice(["", "", "x", "y"]))
            assert way not in dead or dead >= set(ways)
            call = replicas.using(way)
            call.__enter__()
            open_calls.append(call)
        elif step == "end" and open_calls:
            open_calls.pop(random.randrange(len(open_calls))).__exit__(None, None, None)
        elif step == "lose":
            way = random.choice(ways)
            dead.add(way)
            assert replicas.lost(way) == (not dead >= set(ways))
        elif step == "answer" and dead:
            way = random.choice(sorted(dead, key=str))
            dead.discard(way)
            replicas.answered(way)
        elif step == "replace":
            generation += 1
            gone = ways.pop(random.randrange(3))
            dead.discard(gone)
            ways.append(Way(gone.address, generation))
            replicas.adopt(ways)
        least = min((each.in_flight for each in replicas._answering()), default=0)
        assert replicas._replicas[_name(replicas.pick())].in_flight == least
    for call in open_calls:
        call.__exit__(None, None, None)
    assert all(each.in_flight == 0 for each in replicas._replicas.values())


def _name(way: Way) -> tuple[str, int]:
    return way.address, way.attempt


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SEEK_S", 0.05)
    monkeypatch.setattr(jobs, "PAUSE_S", 0.02)


@dataclass
class Two:
    """Two replicas, and a policy served by them."""

    world: World
    doubles: list[InferenceDouble]
    servers: list[grpc.aio.Server]
    policy: ot.Policy


@pytest.fixture
def two(doubles: World, quick: None) -> Two:
    replicas = [InferenceDouble(), InferenceDouble()]
    servers = [doubles.portal.run(doubles.add_replica(double)) for double in replicas]
    policy = doubles.cluster.create_policy("tiny", inference=ot.ServerOptions(replicas=2)).result()
    return Two(doubles, replicas, servers, policy)


def test_a_policy_asks_for_so_many_inference_servers(doubles: World) -> None:
    doubles.cluster.create_policy("tiny", inference=ot.ServerOptions(replicas=3)).result()
    (job,) = doubles.scheduler.jobs.values()
    assert {slot.role: slot.count for slot in job.slots} == {
        job_pb2.SLOT_ROLE_TRAINER: 1,
        job_pb2.SLOT_ROLE_INFERENCE: 3,
    }
    with pytest.raises(errors.InvalidArgument, match="replicas"):
        ot.ServerOptions(replicas=0)
    with pytest.raises(errors.UnsupportedOption, match="ranks=n") as refused:
        doubles.cluster.create_policy("tiny", trainer=ot.ServerOptions(replicas=2))
    assert refused.value.field == "trainer.replicas"


def test_the_turns_of_a_group_are_at_one_replica_and_groups_at_both(two: Two) -> None:
    ot.evaluate(two.policy, GuessNumber, tasks=12, samples=2, sampling=ot.SamplingParams(max_tokens=4))
    first_turns = [[r for r in double.requests if r.n == 2] for double in two.doubles]
    begun_at = [len(requests) for requests in first_turns]
    assert sum(begun_at) == 12
    assert min(begun_at) >= 3  # who is free sooner gets more
    later = [[r for r in double.requests if r.n == 1] for double in two.doubles]
    assert all(later)
    for double, turns in zip(two.doubles, later, strict=True):
        begun = [_ids(request) for request in double.requests if request.n == 2]
        for request in turns:
            # Each later prompt goes on from one whose prefix is in this server's cache.
            assert any(_ids(request)[: len(prompt)] == prompt for prompt in begun)
    # Both were told that the completions have arrived.
    two.world.portal.run(two.policy.sampler.close())
    asked = {request.request_id for double in two.doubles for request in double.requests}
    assert set(two.doubles[0].acknowledged) == set(two.doubles[1].acknowledged) == asked


def _ids(request: Any) -> bytes:
    return bytes(request.prompt.chunks[0].tokens.token_ids)


def test_a_chat_stays_where_it_began(two: Two) -> None:
    for number in range(6):
        said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Hello {number}."}]
        for _ in range(3):
            reply = two.policy.chat(said).result()
            said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And?"}]
    assert [len(double.requests) for double in two.doubles] == [9, 9]


def test_a_version_is_loaded_on_every_replica(two: Two) -> None:
    two.policy.load(0).result()
    assert [double.loaded for double in two.doubles] == [[0], [0]]


def test_requests_of_a_dead_replica_go_to_the_other_once(two: Two) -> None:
    """With the same request id, and each completion is given once; then the successor takes its share."""
    reached = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        reached.set()
        await asyncio.sleep(30)

    two.doubles[1].before = hang

    async def play() -> list[list[ot.Completion]]:
        prompts = [list(range(3, 5 + index)) for index in range(8)]
        calls = [asyncio.ensure_future(_sample(two.policy, prompt)) for prompt in prompts]
        await reached.wait()
        await wait_until(lambda: sum(len(double.requests) for double in two.doubles) == 8)
        await two.servers[1].stop(grace=0)
        return list(await asyncio.gather(*calls))

    results = two.world.portal.run(play())
    assert [[completion.index for completion in result] for result in results] == [[0, 1]] * 8
    asked = Counter(request.request_id for request in two.doubles[0].requests)
    died = [request.request_id for request in two.doubles[1].requests]
    assert len(died) == len(set(died)) == 4
    assert len(asked) == 8
    assert set(died) <= set(asked)
    assert set(asked.values()) == {1}
    # Its address is still named, and does not answer: nobody is sent there.
    for _ in range(4):
        two.policy.sample([1, 2]).result()
    assert len(two.doubles[1].requests) == 4
    # A successor is found without anything failing first.
    del two.world.scheduler.replicas[two.doubles[1].address]
    successor = InferenceDouble()
    two.world.portal.run(two.world.add_replica(successor, attempt=2))
    deadline = time.monotonic() + 20
    while not successor.requests:
        two.policy.sample([1, 2]).result()
        assert time.monotonic() < deadline
    assert successor.requests[0].attempt == 2


async def _sample(policy: ot.Policy, prompt: list[int]) -> list[ot.Completion]:
    return await policy.sample(prompt, ot.SamplingParams(max_tokens=4), n=2, seed=1)


def test_a_replica_that_is_back_is_used_again(two: Two) -> None:
    failures = iter(range(1))

    async def once(request: Any, context: Any) -> None:
        if next(failures, None) is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away for a moment")

    two.doubles[0].before = two.doubles[1].before = once
    deadline = time.monotonic() + 20
    while min(len(double.requests) for double in two.doubles) < 3:
        two.policy.sample([1, 2]).result()
        assert time.monotonic() < deadline


def test_a_request_that_takes_servers_along_is_given_up(two: Two) -> None:
    for double in two.doubles:
        double.fail_after, double.always_fails = 0, True
    with pytest.raises(errors.Unavailable):
        two.policy.sample([1, 2]).result()
    assert sum(len(double.requests) for double in two.doubles) == sampler.MAX_CRASHES + 1
