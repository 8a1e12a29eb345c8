"""The conformance tests on every registered adapter, in this process and on a real env_host."""

import copy
import importlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from opentinker.environments import Action, EnvironmentSource, environment_source
from opentinker.environments.base import is_async
from opentinker.environments.runner import Runner
from opentinker.environments.worker import load
from opentinkerapi.runtime.channels import open_channel
from tests.conformance.case import SEED, AdapterCase, opened, played
from tests.conformance.contract import AdapterConformance
from tests.conformance.hosting import running_host

CASES: list[AdapterCase] = [
    case
    for path in sorted(Path(__file__).parent.glob("cases_*.py"))
    for case in importlib.import_module(f"tests.conformance.{path.stem}").CASES
]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases have the same name"


def named(case: AdapterCase) -> str:
    return case.name


async def local(case: AdapterCase, target: str) -> EnvironmentSource:
    options = case.options if target == case.target else {}
    return await environment_source(load(target, [str(each) for each in case.path]), options)


@pytest.mark.parametrize("case", [case for case in CASES if case.python is None], ids=named)
class TestInProcess(AdapterConformance):
    @pytest.fixture
    async def source(self, case: AdapterCase) -> EnvironmentSource:
        return await local(case, case.target)

    @pytest.fixture
    async def broken(self, case: AdapterCase) -> EnvironmentSource:
        return await local(case, case.crash)

    async def test_the_randomness_of_the_process_is_left_alone(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        """Neither does an episode change it, nor does it depend on it."""
        expected = await played(case, source)
        states: list[Any] = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            states.append((random.getstate(), np.random.get_state()))
            episode = await opened(case, source)
            while await episode.advance():
                assert random.getstate() == states[-1][0]
                for mine, theirs in zip(np.random.get_state(), states[-1][1], strict=True):
                    assert np.array_equal(mine, theirs)
            await episode.session.close()
            assert random.getstate() == states[-1][0]
            assert not case.deterministic or episode.seen == expected.seen

    async def test_a_copy_goes_on_as_the_episode_does(self, case: AdapterCase) -> None:
        """What says that it can be copied is copied whole: a fork is the same episode."""
        cls = load(case.target, [str(each) for each in case.path])
        if not (case.deterministic and getattr(cls, "copyable", True)) or is_async(cls):
            return
        runner, rng = Runner(cls, case.options), random.Random(3)
        pending = await runner.begin(SEED, case.task)
        twin = copy.deepcopy(runner)
        for turn in range(1, 1000):
            said = case.endings[0].play(turn, pending, rng)
            actions = {
                name: each if isinstance(each, Action) else Action(each) for name, each in said.items()
            }
            step, other = await runner.step(actions), await twin.step(actions)
            assert step == other, f"turn {turn}"
            pending = step.observations
            if step.done:
                break
        assert await runner.finalize() == await twin.finalize()


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    environments = {}
    for number, case in enumerate(CASES):
        python = {} if case.python is None else {"python": str(case.python())}
        for kind, target in (("case", case.target), ("crash", case.crash)):
            environments[f"{kind}-{number}"] = {
                "target": target,
                "path": [str(p) for p in case.path],
                **python,
            }
    with running_host(tmp_path_factory.mktemp("env_host"), environments) as port:
        yield port


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=named)
class TestHosted(AdapterConformance):
    @pytest.fixture
    async def channel(self, host_port: int) -> AsyncIterator[grpc.aio.Channel]:
        async with open_channel(f"127.0.0.1:{host_port}") as channel:
            yield channel

    @pytest.fixture
    async def source(self, case: AdapterCase, channel: grpc.aio.Channel) -> AsyncIterator[EnvironmentSource]:
        source = await environment_source(f"case-{CASES.index(case)}", dict(case.options), channel=channel)
        yield source
        await source.close()

    @pytest.fixture
    async def broken(self, case: AdapterCase, channel: grpc.aio.Channel) -> AsyncIterator[EnvironmentSource]:
        source = await environment_source(f"crash-{CASES.index(case)}", channel=channel)
        yield source
        await source.close()

    async def test_it_is_the_same_as_in_process(self, case: AdapterCase, source: EnvironmentSource) -> None:
        if case.python is None and case.deterministic:
            here = await played(case, await local(case, case.target))
            assert (await played(case, source)).seen == here.seen
