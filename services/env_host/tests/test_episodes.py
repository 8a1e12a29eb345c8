"""Order, repetition and limits of the calls on an episode."""

import asyncio
import json

import pytest
from pydantic import ValidationError
from services.env_host.tests.conftest import Start, text_of, world

from opentinker_env_host.settings import EnvHostSettings
from opentinkerapi.data.v1 import trajectory_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1 import environment_pb2
from opentinkerapi.runtime.errors import (
    EnvironmentCrashed,
    EpisodeNotFound,
    FailedPrecondition,
    InvalidArgument,
    MissingDependency,
    OpenTinkerError,
    Overloaded,
    RequestIdReused,
    SeqReused,
    UnknownEnvironment,
)


async def test_an_episode_from_begin_to_finalize(start: Start) -> None:
    host = await start()
    (episode,) = await host.open(seed=7, task_json='{"start": 2}', options_json='{"start": 10}')
    assert (await host.begin(episode)).startswith("count 12 of ")
    answer = await host.step(episode, 1, "go")
    assert text_of(answer.pending).startswith("count 13 of ")
    assert answer.rewards[0].reward.value == 0.5
    assert answer.rewards[0].reward.status == trajectory_pb2.REWARD_STATUS_VALID
    assert not answer.replayed
    assert answer.env_time.ToNanoseconds() > 0
    answer = await host.step(episode, 2, "end")
    assert answer.terminated
    assert not answer.pending
    assert json.loads(answer.info_json) == {"count": 14}
    result = await host.finalize(episode)
    assert result == await host.finalize(episode)
    for last_seq in (1, 3):
        with pytest.raises(FailedPrecondition) as raised:
            await host.call(host.stub.Finalize(pb.FinalizeRequest(episode=episode, last_seq=last_seq)))
        assert (raised.value.reason, raised.value.metadata["next_seq"]) == ("STEP_OUT_OF_ORDER", "3")
    assert result == await host.call(host.stub.Finalize(pb.FinalizeRequest(episode=episode, last_seq=2)))
    assert result.rewards[0].reward.value == 14.5
    assert result.end_reason == trajectory_pb2.END_REASON_TERMINATED
    assert json.loads(result.metrics_json) == {"count": 14}
    await host.close([episode, "episodes/never-was"])
    with pytest.raises(EpisodeNotFound):
        await host.begin(episode)


async def test_members_of_a_group_see_the_same_and_other_seeds_do_not(start: Start) -> None:
    host = await start()
    group = await host.open(size=4, seed=3)
    first = await asyncio.gather(*(host.begin(episode) for episode in group))
    assert len(set(first)) == 1
    (other,) = await host.open(seed=4)
    assert await host.begin(other) not in first


async def test_begin_and_the_last_step_again_are_answered_without_playing(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    assert await host.begin(episode) == await host.begin(episode)
    # Two at once: the second finds the first one running.
    once, again = await asyncio.gather(host.step(episode, 1, "sleep"), host.step(episode, 1, "sleep"))
    assert once == again
    assert once == await host.step(episode, 1, "sleep")
    assert text_of((await host.step(episode, 2, "go")).pending).startswith("count 2 ")
    with pytest.raises(SeqReused):
        await host.step(episode, 2, "other")


async def test_a_wrong_seq_is_refused_and_says_the_next(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    with pytest.raises(FailedPrecondition, match="call Begin first"):
        await host.step(episode, 1, "go")
    await host.begin(episode)
    for seq in (2, 5, -1):
        with pytest.raises(FailedPrecondition) as raised:
            await host.step(episode, seq, "go")
        assert raised.value.reason == "STEP_OUT_OF_ORDER"
        assert raised.value.metadata["next_seq"] == "1"
    await host.step(episode, 1, "end")
    with pytest.raises(FailedPrecondition, match="takes no more steps"):
        await host.step(episode, 2, "go")


async def test_a_caller_who_gives_up_finds_the_answer_when_he_asks_again(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    impatient = asyncio.create_task(host.step(episode, 1, "sleep"))
    await asyncio.sleep(0.1)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert text_of((await host.step(episode, 1, "sleep")).pending).startswith("count 1 ")


async def test_open_group_is_idempotent_by_request_id(start: Start) -> None:
    host = await start()
    request = pb.OpenGroupRequest(request_id="r", environment="environments/counter", size=3)
    first = await host.call(host.stub.OpenGroup(request))
    assert (await host.call(host.stub.OpenGroup(request))).episodes == first.episodes
    request.size = 4
    with pytest.raises(RequestIdReused):
        await host.call(host.stub.OpenGroup(request))
    # A request that failed leaves its id free.
    bad = pb.OpenGroupRequest(
        request_id="s", environment="environments/counter", size=3, options_json='{"x":1}'
    )
    with pytest.raises(InvalidArgument):
        await host.call(host.stub.OpenGroup(bad))
    bad.options_json = ""
    await host.call(host.stub.OpenGroup(bad))


async def test_bad_requests_are_refused_by_name(start: Start) -> None:
    host = await start({"counter": world("Counter"), "broken": world("Broken"), "missing": world("Nowhere")})
    with pytest.raises(UnknownEnvironment, match="known: counter") as unknown:
        await host.open("chess")
    assert unknown.value.field == "environment"
    with pytest.raises(MissingDependency, match="no environment"):
        await host.open("broken")
    with pytest.raises(MissingDependency, match="has no attribute 'Nowhere'"):
        await host.open("missing")
    for field, fields in {
        "size": {"size": 0},
        "task_json": {"task_json": "[1]"},
        "options_json": {"options_json": "{"},
        "step_timeout": {"timeout_s": 0.001},
        "lease_ttl": {"ttl_s": 1e6},
    }.items():
        with pytest.raises(InvalidArgument) as raised:
            await host.open(**fields)  # type: ignore[arg-type]
        assert raised.value.field == field
    with pytest.raises(InvalidArgument, match="allowed: start, flag") as raised:
        await host.open(options_json='{"speed": 3}')
    assert raised.value.field == "options_json"
    (episode,) = await host.open()
    await host.begin(episode)
    two = [environment_pb2.AgentAction(agent=name, action=environment_pb2.Action()) for name in ("a", "b")]
    with pytest.raises(InvalidArgument, match=r"moves of \['agent'\] are pending .* not of \['a', 'b'\]"):
        await host.call(host.stub.Step(pb.StepRequest(episode=episode, seq=1, actions=two)))
    with pytest.raises(InvalidArgument, match="'a' has two actions") as raised:
        await host.call(host.stub.Step(pb.StepRequest(episode=episode, seq=1, actions=[two[0], two[0]])))
    assert raised.value.field == "actions[1].agent"


async def test_more_episodes_than_allowed_are_refused_until_some_are_closed(start: Start) -> None:
    host = await start(max_episodes=3, max_group_size=2)
    with pytest.raises(InvalidArgument, match="from 1 to 2"):
        await host.open(size=3)
    open_ones = await host.open(size=2)
    with pytest.raises(Overloaded) as raised:
        await host.open(size=2)
    assert raised.value.retry_after_s == 1.0
    await host.close(open_ones)
    await host.open(size=2)


def test_a_quota_of_projects_that_nobody_names_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_project_episodes: without require_job_tokens"):
        EnvHostSettings(max_project_episodes=3)


async def test_what_the_environment_raises_ends_its_episode_only(start: Start) -> None:
    host = await start()
    bad, nan, good = await host.open(size=3)
    for episode in (bad, nan, good):
        await host.begin(episode)
    with pytest.raises(
        EnvironmentCrashed, match=r"Counter\.step raised RuntimeError: the goblin left"
    ) as raised:
        await host.step(bad, 1, "raise")
    assert raised.value.metadata["end_reason"] == "ENV_CRASH"
    with pytest.raises(EnvironmentCrashed, match="goblin"):
        await host.step(bad, 2, "go")
    with pytest.raises(EnvironmentCrashed, match="rewards must be finite"):
        await host.step(nan, 1, "nan")
    assert (await host.step(good, 1, "go")).rewards[0].reward.value == 0.5
    assert len(host.workers()) == 1
    assert [fact.reason for fact in host.bus.failed] == ["ENV_CRASH", "ENV_CRASH"]


async def test_leases_expire_unless_renewed(start: Start) -> None:
    host = await start()
    kept, lost = await host.open(size=2, ttl_s=1.0)
    await host.begin(kept)
    for _ in range(8):
        await asyncio.sleep(0.2)
        answer = await host.call(host.stub.RenewLease(pb.RenewLeaseRequest(episodes=[kept])))
        assert not answer.lost_episodes
    await host.step(kept, 1, "go")
    with pytest.raises(EpisodeNotFound):
        await host.begin(lost)
    answer = await host.call(host.stub.RenewLease(pb.RenewLeaseRequest(episodes=[kept, lost])))
    assert list(answer.lost_episodes) == [lost]
    assert [(fact.episode, fact.reason) for fact in host.bus.failed] == [(lost, "LEASE_EXPIRED")]


async def test_lists_are_paged(start: Start) -> None:
    host = await start({"counter": world("Counter"), "honest": world("Honest"), "rich": world("Rich")})
    first = await host.call(host.stub.ListEnvironments(pb.ListEnvironmentsRequest(page_size=2)))
    assert [item.name for item in first.environments] == ["environments/counter", "environments/honest"]
    rest = pb.ListEnvironmentsRequest(page_token=first.next_page_token)
    second = await host.call(host.stub.ListEnvironments(rest))
    assert [item.name for item in second.environments] == ["environments/rich"]
    assert not second.next_page_token
    assert [item.deterministic for item in first.environments] == [True, False]
    one = await host.call(host.stub.GetEnvironment(pb.GetEnvironmentRequest(name="environments/counter")))
    assert one.environment.description.startswith("Counts its steps")
    with pytest.raises(OpenTinkerError) as raised:
        await host.call(host.stub.GetEnvironment(pb.GetEnvironmentRequest(name="environments/chess")))
    assert raised.value.reason == "ENVIRONMENT_NOT_FOUND"

    request = pb.ListTasksRequest(environment="environments/counter", split="train", page_size=1000)
    tasks = []
    while True:
        page = await host.call(host.stub.ListTasks(request))
        assert page.total_size == 2500
        tasks += [json.loads(task)["start"] for task in page.tasks_json]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert tasks == list(range(2500))
    request = pb.ListTasksRequest(environment="environments/counter", split="test")
    with pytest.raises(InvalidArgument, match="known: train"):
        await host.call(host.stub.ListTasks(request))
    request = pb.ListTasksRequest(environment="environments/counter", split="train", page_token="bm8=")
    with pytest.raises(InvalidArgument) as raised:
        await host.call(host.stub.ListTasks(request))
    assert raised.value.reason == "INVALID_PAGE_TOKEN"


async def test_messages_images_and_reward_parts_cross_the_pipe(start: Start) -> None:
    host = await start({"rich": world("Rich")})
    (episode,) = await host.open("rich")
    answer = await host.call(host.stub.Begin(pb.BeginRequest(episode=episode)))
    messages = answer.pending[0].observation.chat.messages
    assert [(item.role, item.content.parts[0].text) for item in messages] == [
        ("system", "be kind"),
        ("user", "hi"),
    ]
    step = await host.step(episode, 1, "")
    observation = step.pending[0].observation
    assert observation.content.parts[1].image.inline == b"\x89PNG" + bytes(1000)
    assert list(observation.legal_actions) == ["left", "right"]
    assert dict(step.rewards[0].reward.components) == {"style": 0.25, "truth": 0.75}
