"""One class of tests for every adapter: what an environment of any library promises once it is adapted."""

import pytest

from opentinker.environments import (
    Action,
    EndReason,
    EnvironmentInfo,
    EnvironmentSource,
    end_reason_of,
)
from opentinkerapi.runtime.errors import EnvironmentCrashed, FailedPrecondition
from tests.conformance.case import SEED, AdapterCase, opened, played


class AdapterConformance:
    """The tests. A subclass gives the fixtures `case`, `source` of its episodes, and `broken`: a source of
    those of the environment whose first step raises.
    """

    async def test_the_same_seed_is_the_same_episode(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        if not case.deterministic:
            assert not source.info.deterministic, "it says that it repeats itself"
            return
        assert source.info.deterministic
        first = await played(case, source)
        assert (await played(case, source)).seen == first.seen

    async def test_another_seed_is_another_episode(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        alone = await played(case, source, turns=8)
        others = [await played(case, source, seed=SEED + more, turns=8) for more in range(1, 6)]
        differ = any(other.seen != alone.seen for other in others)
        assert differ == case.draws or not case.deterministic

    async def test_interleaved_episodes_do_not_disturb_each_other(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        if not case.deterministic:
            return
        seeds = (SEED, SEED + 1, SEED)
        alone = [await played(case, source, seed=seed) for seed in seeds]
        together = [await opened(case, source, seed=seed) for seed in seeds]
        going = True
        while going:
            going = any([await episode.advance() for episode in together])
        for episode, expected in zip(together, alone, strict=True):
            assert episode.seen == expected.seen
            await episode.session.close()

    async def test_every_ending_has_its_reason_and_its_returns(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        for number, ending in enumerate(case.endings):
            episode = await played(case, source, ending=number)
            result = episode.result
            assert result is not None
            assert result.end_reason is ending.end
            returns = {name: result.rewards[name].value for name in ending.returns}
            assert returns == pytest.approx(ending.returns), f"{case.name}, ending {number}"

    async def test_rewards_are_converted_once(self, case: AdapterCase, source: EnvironmentSource) -> None:
        for number, ending in enumerate(case.endings):
            episode = await played(case, source, ending=number)
            assert episode.result is not None
            for name, value in episode.sums().items():
                assert episode.result.rewards[name].value == pytest.approx(value), f"{name} of {number}"
            assert {name for step in episode.steps for name in step.rewards} >= set(ending.returns)

    async def test_who_moves_when(self, case: AdapterCase, source: EnvironmentSource) -> None:
        episode = await played(case, source)
        assert set(episode.first) <= set(source.info.agents)
        assert [sorted(names) for names in episode.moved[: len(case.order)]] == [
            sorted(names) for names in case.order
        ]
        gone: set[str] = set()
        for step in episode.steps:
            gone |= set(step.ended)
            assert step.done or not gone & set(step.observations)

    async def test_legal_actions_are_listed_where_there_are_masks(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        episode = await played(case, source)
        shown = [episode.first, *(step.observations for step in episode.steps if not step.done)]
        listed = [bool(seen.legal_actions) for observations in shown for seen in observations.values()]
        assert all(listed) if case.masks else not any(listed)

    async def test_nothing_follows_the_end(self, case: AdapterCase, source: EnvironmentSource) -> None:
        episode = await opened(case, source)
        while await episode.advance():
            pass
        (*_, movers) = episode.moved
        with pytest.raises(FailedPrecondition):
            await episode.session.step_all({name: Action("?") for name in movers}, len(episode.steps) + 1)
        assert await episode.session.finalize_all() == episode.result
        await episode.session.close()

    async def test_a_step_sent_twice_is_played_once(
        self, case: AdapterCase, source: EnvironmentSource
    ) -> None:
        again = await played(case, source, twice=True)
        if case.deterministic:
            assert again.seen == (await played(case, source)).seen

    async def test_a_crash_ends_the_episode_without_a_reward(
        self, case: AdapterCase, broken: EnvironmentSource
    ) -> None:
        (session,) = await broken.open_group(task=case.task, seed=SEED, size=1)
        pending = await session.begin_all()
        said = case.crash_says if isinstance(case.crash_says, Action) else Action(case.crash_says)
        for call in (lambda: session.step_all(dict.fromkeys(pending, said), 1), session.finalize_all):
            with pytest.raises(EnvironmentCrashed) as raised:
                await call()
            assert end_reason_of(raised.value) is EndReason.ENV_CRASH
        await session.close()

    async def test_it_says_what_it_is(self, case: AdapterCase, source: EnvironmentSource) -> None:
        info: EnvironmentInfo = source.info
        assert info.name
        assert info.description
        for split in info.splits:
            tasks = await source.tasks(split)
            assert tasks is None or len(tasks) > 0
