"""Names, and what serves them."""

import openai
import pytest
from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import BASE, KEY

from opentinker_gateway.adapters import jobs
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_models_are_listed_and_shown(world: World) -> None:
    listed = [model async for model in world.client().models.list()]
    assert [model.id for model in listed] == ["mine", BASE, "policies/p"]
    shown = await world.client().models.retrieve("policies/p")
    assert shown.model_extra is not None
    assert shown.model_extra["root"] == "policies/p/versions/3"
    with pytest.raises(openai.NotFoundError):
        await world.client().models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("mine", "policies/p/versions/3"),
        ("deployments/mine", "policies/p/versions/3"),
        ("policies/p", "policies/p/versions/3"),
        ("policies/p/versions/2", "policies/p/versions/2"),
        (BASE, f"models/{BASE}"),
    ],
)
async def test_every_kind_of_name_is_served(world: World, name: str, weights: str) -> None:
    reply = await world.client().chat.completions.create(model=name, messages=HI)
    assert reply.system_fingerprint == weights
    asked = world.inference.requests[-1].model
    assert (
        asked.base_model or f"{asked.policy_version.policy}/versions/{asked.policy_version.version}"
    ) in weights


async def test_a_promotion_is_seen_by_the_next_request(world: World) -> None:
    for version in (3, 4):
        world.scheduler.deployed = f"policies/p/versions/{version}"
        await world.client().chat.completions.create(model="mine", messages=HI)
        assert world.inference.requests[-1].model.policy_version.version == version


async def test_what_nobody_serves_gets_one_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made with the caller's key, used by all that want the same, ended when nobody asks any more."""
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    for _ in range(3):
        await world.client().chat.completions.create(model=BASE, messages=HI)
    (job,) = world.scheduler.created
    assert job.kind == job_pb2.JOB_KIND_INFERENCE
    assert job.on_client_loss == job_pb2.ON_CLIENT_LOSS_CANCEL
    assert [slot.base_model for slot in job.slots] == [BASE]
    assert world.inference.requests[-1].job_token == "token-of-the-gateway"
    assert world.scheduler.finished == []
    await world.gateway.models.close()
    assert world.scheduler.finished == ["jobs/1"]


async def test_a_job_that_fails_says_why(world: World) -> None:
    world.scheduler.job_error = Reason.CANNOT_BE_SATISFIED
    with pytest.raises(openai.BadRequestError, match="no room for the model") as caught:
        await world.client().chat.completions.create(model=BASE, messages=HI)
    assert caught.value.code == "cannot_be_satisfied"


@pytest.mark.parametrize("world", [{"model_start_s": 0.2}], indirect=True)
async def test_a_start_that_takes_long_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_S", 0.05)
    world.scheduler.renewals_until_running = 10**9
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client().chat.completions.create(model=BASE, messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"
    world.scheduler.renewals_until_running = 0
    assert (await world.client().chat.completions.create(model=BASE, messages=HI)).choices
    assert len(world.scheduler.created) == 1


@pytest.mark.parametrize("world", [{"on_demand_idle_s": 0.1}], indirect=True)
async def test_a_job_that_nobody_needs_ends(world: World) -> None:
    await world.client().chat.completions.create(model=BASE, messages=HI)

    async def ended() -> bool:
        models = world.gateway.models
        await models._jobs.keep(await models._scheduler())
        return world.scheduler.finished == ["jobs/1"]

    await wait_until(ended, 10)
    await world.client().chat.completions.create(model=BASE, messages=HI)
    assert len(world.scheduler.created) == 2


def endpoint(name: str) -> job_pb2.Endpoint:
    return job_pb2.Endpoint(server=name, address=name)


async def test_conversations_stay_where_their_beginning_is(world: World) -> None:
    models = world.gateway.models
    three = [endpoint(name) for name in ("a", "b", "c")]
    own = {talk: models.choose(three, talk).server for talk in map(str, range(60))}
    assert set(own.values()) == {"a", "b", "c"}
    # One that goes takes only its own conversations along.
    two = three[:2]
    assert all(models.choose(two, talk).server == name for talk, name in own.items() if name != "c")
    # One that has far more to do than another is passed by, and without a conversation the idlest is taken.
    models.load |= {"a": 9, "b": 8}
    assert {models.choose(three, talk).server for talk in own} == {"c"}
    assert models.choose(three, "").server == "c"


async def test_health(world: World) -> None:
    async with world.http() as client:
        client.headers.pop("authorization")
        assert (await client.get("/health")).json() == {"status": "serving"}
        assert (await client.get("/health/live")).json() == {"status": "live"}
    assert KEY not in repr(world.gateway)
