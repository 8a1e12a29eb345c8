"""Deployments from the client: made, promoted, talked to; and the commands around them."""

import asyncio
import threading
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import abort
from typer.testing import CliRunner

import opentinker as ot
from opentinker import errors
from opentinker.cli.app import app
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack_ids
from opentinkerapi.scheduler.v1 import job_pb2

P = "policies/p1"
HELLO = "Guess again 🎲!"


@pytest.fixture
def world(doubles: World) -> World:
    doubles.inference.speak = lambda version, seed, prompt: f"{HELLO} v{version}"
    return doubles


def models_asked(world: World) -> list[sampling_pb2.ModelRef]:
    return [request.model for request in world.inference.requests]


def test_a_policy_is_deployed_once_it_answers(world: World) -> None:
    policy = world.cluster.create_policy("tiny").result()
    made = policy.deploy("guesser").result()
    assert (made.name, made.model, made.state) == ("guesser", f"{policy.name}/versions/0", "serving")
    probe = world.inference.requests[-1]
    assert (probe.model.policy_version.policy, probe.params.max_tokens) == (policy.name, 1)
    assert ot.deployments()[0].name == "guesser"
    # Leaving ends the jobs of this client, and not the deployment's.
    world.portal.run(world.cluster.leave(failed=False))
    states = {name: job.state for name, job in world.scheduler.jobs.items()}
    assert states.pop("jobs/of-guesser") == job_pb2.JOB_STATE_RUNNING
    assert set(states.values()) == {job_pb2.JOB_STATE_SUCCEEDED}


def test_promoting_loads_first_and_then_switches(world: World) -> None:
    made = world.cluster.serve(f"{P}/versions/1", "guesser").result()
    asked = len(world.inference.requests)
    made.promote(P).result()
    assert (made.model, made.previous_models) == (f"{P}/versions/3", (f"{P}/versions/1",))
    assert [ref.policy_version.version for ref in models_asked(world)[asked:]] == [3]
    made.promote(f"{P}/checkpoints/c1").result()
    assert models_asked(world)[-1].checkpoint == f"{P}/checkpoints/c1"
    made.roll_back().result()
    assert made.roll_back().result().model == f"{P}/versions/1"
    with pytest.raises(errors.FailedPrecondition, match="nothing to go back to"):
        made.roll_back().result()
    made.delete().result()
    assert world.cluster.deployments().result() == []
    with pytest.raises(errors.NotFound):
        world.cluster.deployment("guesser").result()


def test_weights_that_do_not_load_change_nothing(world: World) -> None:
    """A corrupt version: a deployment of it is not left behind, one that is promoted to it goes on."""
    made = world.cluster.serve("tiny", "guesser").result()

    async def refuse(request: Any, context: Any) -> None:
        if request.model.policy_version.version == 3:
            await abort(context, Reason.INVALID_WEIGHTS, "up_proj has NaN")

    world.inference.before = refuse
    with pytest.raises(errors.InvalidArgument, match="NaN"):
        made.promote(P).result()
    assert made.refresh().result().model == "models/tiny"
    with pytest.raises(errors.InvalidArgument, match="NaN"):
        world.cluster.serve(P, "other").result()
    assert world.catalog.deleted == ["deployments/other"]
    assert [each.name for each in ot.deployments(cluster=world.cluster)] == ["guesser"]


def test_a_merged_server_that_is_busy_with_another_policy_is_waited_for(world: World) -> None:
    made = world.cluster.serve(f"{P}/versions/1", "guesser").result()
    refusals = 2

    async def busy(request: Any, context: Any) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            await abort(context, Reason.MERGED_ONE_VERSION, "policies/p0 is being sampled")

    world.inference.before = busy
    assert made.promote(f"{P}/versions/2").result().model == f"{P}/versions/2"
    assert made.chat("hi").result() == f"{HELLO} v2"
    assert refusals == 0


def test_taken_names_and_no_gateway_are_said(world: World) -> None:
    made = world.cluster.serve("tiny", "guesser").result()
    with pytest.raises(errors.AlreadyExists, match="guesser already"):
        world.cluster.serve("tiny", "guesser").result()
    with pytest.raises(errors.FailedPrecondition, match="no gateway"):
        _ = made.url
    world.scheduler.gateway = "http://127.0.0.1:80"
    assert world.cluster.deployment("guesser").result().url == "http://127.0.0.1:80/v1"
    assert world.cluster.api_key == "key"


def test_what_a_name_stands_for_is_asked_for_each_reply(world: World) -> None:
    made = world.cluster.serve(f"{P}/versions/1", "guesser").result()
    model = world.cluster.model("guesser")
    assert model.chat("hi").result() == f"{HELLO} v1"
    world.catalog.deployments["deployments/guesser"].model = f"{P}/versions/2"
    assert model.chat([{"role": "user", "content": "hi"}]).result() == f"{HELLO} v2"
    assert made.chat("hi", ot.SamplingParams(temperature=0.0), seed=7).result() == f"{HELLO} v2"
    last = world.inference.requests[-1]
    assert (last.params.temperature, last.params.seed) == (0.0, 7)
    assert last.attempt == 1
    assert last.job_token == "token"
    assert len({request.conversation for request in world.inference.requests[-3:-1]}) == 1


def test_what_no_deployment_serves_gets_a_job_of_this_client(world: World) -> None:
    model = world.cluster.model("tiny")
    assert model.chat("hi").result() == f"{HELLO} v0"
    assert model.chat("hi").result() == f"{HELLO} v0"
    assert models_asked(world)[-1].base_model == "tiny"
    (job,) = world.scheduler.jobs.values()
    assert (job.kind, job.on_client_loss) == (
        job_pb2.JOB_KIND_INFERENCE,
        job_pb2.ON_CLIENT_LOSS_CANCEL,
    )
    world.portal.run(world.cluster.leave(failed=False))
    assert job.state == job_pb2.JOB_STATE_SUCCEEDED


def test_a_reply_is_streamed_on_any_loop(world: World) -> None:
    model = world.cluster.model("tiny")

    async def listen() -> list[str]:
        return [part async for part in model.stream("hi")]

    parts = asyncio.run(listen())
    assert "".join(parts) == f"{HELLO} v0"
    assert len(parts) > 5
    world.portal.run(world.cluster.leave(failed=False))
    assert world.inference.acknowledged[-1] == world.inference.requests[-1].request_id


def test_a_stream_that_breaks_off_goes_on_where_it_was(world: World) -> None:
    world.inference.break_text_after = 6
    model = world.cluster.model("tiny")
    assert model.chat("hi").result() == f"{HELLO} v0"
    first, second = world.inference.requests
    assert first.request_id == second.request_id
    world.inference.always_fails = True
    with pytest.raises(errors.Unavailable, match="the engine died"):
        model.chat("hi").result()
    assert len(world.inference.requests) == 6


def test_who_stops_listening_cancels_the_request(world: World) -> None:
    world.inference.pause_s = 0.01
    model = world.cluster.model("tiny")

    async def leave_early() -> None:
        stream = model.stream("hi")
        assert await anext(stream) == "G"
        await stream.aclose()

    asyncio.run(leave_early())
    world.portal.run(world.cluster.leave(failed=False))
    assert world.inference.cancelled == [world.inference.requests[0].request_id]


def cli(world: World, *arguments: str, text: str = "") -> Any:
    options = ["--address", world.scheduler.address, "--key", "k"]
    command = [arguments[0], *options, *arguments[1:]]
    done: list[Any] = []
    # A thread: the doubles answer on the client's loop, and this one must not be in their way.
    worker = threading.Thread(target=lambda: done.append(CliRunner().invoke(app, command, input=text)))
    worker.start()
    worker.join(60)
    assert done, "the command did not end"
    return done[0]


def test_chat_keeps_what_was_said(world: World) -> None:
    world.cluster.serve(f"{P}/versions/1", "guesser").result()
    asked = len(world.inference.requests)
    done = cli(world, "chat", "guesser", "--system", "Be brief.", text="one\n\ntwo\n/new\nthree\n/what\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count(f"{HELLO} v1\n") == 3
    assert "/what is no command" in done.stderr
    decode = world.inference.tokenizer.decode
    prompts = [
        decode(unpack_ids(request.prompt.chunks[0].tokens.token_ids))
        for request in world.inference.requests[asked:]
    ]
    assert ["Be brief." in prompt for prompt in prompts] == [True] * 3
    assert "one" in prompts[1]
    assert "Guess again" in prompts[1]
    assert "one" not in prompts[2]


def test_chat_says_one_thing_and_ends(world: World) -> None:
    done = cli(
        world, "chat", "tiny", "--message", "hi", "--temperature", "0", "--max-tokens", "9", "--seed", "3"
    )
    assert (done.exit_code, done.stdout) == (0, f"{HELLO} v0\n")
    params = world.inference.requests[-1].params
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 9, 3)


def test_chat_goes_on_after_a_refusal(world: World) -> None:
    async def refuse(request: Any, context: Any) -> None:
        if len(world.inference.requests) == 1:
            await abort(context, Reason.PROMPT_TOO_LONG, "the prompt has 9000 tokens, the context 4096")

    world.inference.before = refuse
    done = cli(world, "chat", "tiny", text="one\ntwo\n")
    assert done.exit_code == 0, done.output
    assert "the prompt has 9000 tokens" in done.stderr
    assert done.stdout == f"\n{HELLO} v0\n" or done.stdout == f"{HELLO} v0\n"


def test_deployments_on_the_command_line(world: World) -> None:
    done = cli(world, "deployments")
    assert "nothing is served" in done.output
    world.scheduler.gateway = "http://127.0.0.1:80"
    done = cli(world, "serve", P, "guesser")
    assert done.exit_code == 0, done.output
    assert f"guesser serves {P}/versions/3" in done.output
    assert "http://127.0.0.1:80/v1" in done.output
    done = cli(world, "deployments", "promote", "guesser", f"{P}/versions/1")
    assert f"guesser serves {P}/versions/1" in done.output
    done = cli(world, "deployments", "roll-back", "guesser")
    assert f"guesser serves {P}/versions/3" in done.output
    done = cli(world, "deployments")
    assert "guesser" in done.output
    assert "serving" in done.output
    done = cli(world, "deployments", "delete", "guesser")
    assert "served no longer" in done.output
    done = cli(world, "deployments", "delete", "guesser")
    assert done.exit_code != 0
    assert "there is no deployments/guesser" in str(done.exception)
