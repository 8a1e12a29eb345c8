"""TRL's environment factories: what TRL 1.16 does with them, and what TRL itself says of the same class."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from opentinker.environments import (
    Action,
    EnvironmentDefinitionError,
    Message,
    Observation,
    RewardStatus,
    ToolCall,
    environment_source,
)
from opentinker.environments.adapters.trl import trl_environment
from opentinker.environments.content import Image, Text


class Shop:
    """A shop."""

    def __init__(self) -> None:
        self.bought: list[str] = []
        self.thread = ""

    def reset(self, *, item: str, **row: Any) -> str | None:
        self.wanted = item
        return f" (You want: {item}.)" if row.get("tell", True) else None

    def buy(self, item: str, count: int = 1) -> int:
        """Buys something.

        Args:
            item: what to buy
            count: how many
        """
        if item == "moon":
            raise ValueError("not for sale")
        self.thread = threading.current_thread().name
        self.bought += [item] * count
        return len(self.bought)

    async def ask(self, question: str) -> list[dict[str, Any]]:
        """Asks the keeper.

        Args:
            question: what to ask
        """
        return [{"type": "text", "text": f"{question}? "}, {"type": "image", "image": b"png"}]

    def _hidden(self) -> None: ...

    def get_reward(self) -> float | None:
        return 0.5 if self.bought else None


def right(
    completions: list[Any], environments: list[Any], item: list[str], log_metric: Any, **more: Any
) -> list[Any]:
    """1 where the last thing said names the item."""
    assert more["prompts"][0][-1]["role"] == "user"
    log_metric("bought", len(environments[0].bought))
    return [float(item[0] in completions[0][-1]["content"])]


async def brief(completions: list[Any], **more: Any) -> list[float | None]:
    """Says nothing where no tool was called."""
    return [None if len(completions[0]) == 1 else -0.25]


def weigh(what: str) -> str:
    """Weighs something.

    Args:
        what: what to weigh
    """
    return f"{what}: 1 kg"


ROW = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Buy."}],
    "item": "apple",
}
ENV = trl_environment(Shop, [ROW], reward_funcs=[right, brief], reward_weights=[1.0, 2.0], tools=[weigh])


async def begun(env: Any = ENV, row: Any = ROW, seed: int = 7) -> Any:
    (session,) = await (await environment_source(env)).open_group(task=row, seed=seed, size=1)
    return session, await session.begin()


async def test_an_episode_as_trl_plays_it() -> None:
    session, first = await begun()
    assert first.messages == (Message("system", "Be brief."), Message("user", "Buy. (You want: apple.)"))
    calls = (ToolCall("buy", '{"item": "apple", "count": 2}'), ToolCall("ask", '{"question": "really"}'))
    told = (await session.step(Action("", calls), 1)).observation.messages
    assert [message.name for message in told] == ["buy", "ask"]
    assert told[0].content.text == "2"
    assert told[1].content.parts == (Text("really? "), Image(b"png"))
    told = (await session.step(Action("", (ToolCall("buy", '{"item": "moon"}'),)), 2)).observation.messages
    assert told[0].content.text == "{'error': 'not for sale'}"
    told = (
        await session.step(Action("", (ToolCall("weigh", '{"what": "it"}'), ToolCall("reset"))), 3)
    ).observation
    assert "it: 1 kg" in told.messages[0].content.text
    assert "no tool 'reset'" in told.messages[1].content.text
    end = await session.step(Action("an apple"), 4)
    assert end.reward.value == pytest.approx(1.0 + 2.0 * -0.25 + 0.5)
    assert end.reward.components == {"right": 1.0, "brief": -0.25, "Shop": 0.5}
    result = await session.finalize()
    assert (result.reward.value, result.metrics) == (1.0, {"bought": 2.0})
    await session.close()


async def test_none_leaves_a_reward_out_and_all_none_is_no_reward() -> None:
    session, _ = await begun()
    assert (await session.step(Action("pear"), 1)).reward.components == {"right": 0.0}
    session, _ = await begun(trl_environment(Shop))
    assert (await session.step(Action("pear"), 1)).reward.status is RewardStatus.UNSCORED


async def test_an_episode_that_a_limit_ends_is_scored_as_trl_does() -> None:
    session, _ = await begun()
    await session.step(Action("", (ToolCall("buy", '{"item": "apple"}'),)), 1)
    assert (await session.finalize()).reward.components["Shop"] == 0.5


async def test_a_tool_that_ends_the_process_is_told_to_the_model() -> None:
    class Leaves(Shop):
        def buy(self, item: str, count: int = 1) -> int:
            """Leaves."""
            raise SystemExit(3)

    session, _ = await begun(trl_environment(Leaves))
    told = (await session.step(Action("", (ToolCall("buy", '{"item": "x"}'),)), 1)).observation.messages
    assert told[0].content.text == "{'error': 'SystemExit: 3'}"


async def test_plain_methods_may_block() -> None:
    found: list[str] = []

    class Slow(Shop):
        def buy(self, item: str, count: int = 1) -> int:
            """Buys."""
            found.append(threading.current_thread().name)
            return 0

    session, _ = await begun(trl_environment(Slow))
    await session.step(Action("", (ToolCall("buy", '{"item": "x"}'),)), 1)
    assert found != [threading.main_thread().name]
    assert len(found) == 1


async def test_a_reset_that_names_a_seed_gets_the_groups() -> None:
    class Drawn:
        def reset(self, seed: int, **row: Any) -> str:
            return f"{seed}"

        def get_reward(self) -> float:
            return 1.0

    _, first = await begun(trl_environment(Drawn), {}, seed=99)
    assert first == Observation(messages=[Message("user", "99")])
    _, first = await begun(trl_environment(Drawn), {"seed": 3, "prompt": "Seed: "})
    assert first.messages[0].content.text == "Seed: 3"


async def test_a_reward_function_that_fails_is_no_reward() -> None:
    def broken(completions: Any, **more: Any) -> list[float]:
        return [1.0, 2.0]

    session, _ = await begun(trl_environment(Shop, reward_funcs=broken))
    end = await session.step(Action("x"), 1)
    assert end.reward.status is RewardStatus.GRADER_ERROR
    assert "broken gave 2 rewards" in end.info["grader_error"]


def test_what_cannot_be_is_refused_by_name() -> None:
    def of_ids(completion_ids: Any, **more: Any) -> list[float]:
        return [0.0]

    class Bare:
        def reset(self) -> None: ...

    for options, match in (
        ({"reward_funcs": of_ids}, "completion_ids"),
        ({"reward_funcs": ["a/model"]}, "is no function"),
        ({"reward_funcs": right, "reward_weights": [1.0, 2.0]}, "reward_weights: 2 for 1"),
    ):
        with pytest.raises(EnvironmentDefinitionError, match=match):
            trl_environment(Shop, **options)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentDefinitionError, match="no get_reward"):
        trl_environment(Bare)
    with pytest.raises(EnvironmentDefinitionError, match="no `reset`"):
        trl_environment(object)
    with pytest.raises(EnvironmentDefinitionError, match="one factory"):
        trl_environment({"a": Shop})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trl_itself_plays_the_same_class_alike(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One training step of TRL's own trainer: its tools, its prompts, what it calls reward functions with."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema

    seen: dict[str, Any] = {}

    def spy(**asked: Any) -> list[float | None]:
        seen.update(asked)
        return right(**asked) * len(asked["prompts"])

    def bought(environments: list[Any], **more: Any) -> list[float | None]:
        return [None if not each.bought else 1.0 for each in environments]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    trainer = trl.GRPOTrainer(
        model=str(tiny_model_dir),
        processing_class=tokenizer,
        environment_factory=Shop,
        tools=[weigh],
        reward_funcs=[spy, bought],
        train_dataset=datasets.Dataset.from_list([ROW] * 4),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_generations=2,
            max_steps=1,
            max_completion_length=4,
            reward_weights=[1.0, 2.0],
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    ours = trl_environment(Shop, [ROW], reward_funcs=[spy, bought], reward_weights=[1.0, 2.0], tools=[weigh])
    theirs = {
        function.__name__: get_json_schema(function)["function"] for function in trainer._env_tools[None]
    }
    assert list(theirs) == [tool.name for tool in ours.tools]
    for tool in ours.tools:
        function = tool.schema["function"]
        assert function["description"] == theirs[tool.name]["description"]
        properties = theirs[tool.name]["parameters"]["properties"]
        assert {
            name: (each["type"], each["description"])
            for name, each in function["parameters"]["properties"].items()
        } == {name: (each["type"], each["description"]) for name, each in properties.items()}
    trainer.train()
    asked_by_trl = {key: value[0] for key, value in seen.items() if isinstance(value, list)}
    seen.clear()

    async def play() -> None:
        session, first = await begun(ours)
        await session.step(Action("an apple"), 1)
        asked = {key: value[0] for key, value in seen.items() if isinstance(value, list)}
        assert (
            asked["prompts"] == asked_by_trl["prompts"] == [message.to_dict() for message in first.messages]
        )
        assert set(asked_by_trl) - set(asked) == {"completion_ids"}
        assert asked["item"] == asked_by_trl["item"] == "apple"
        assert set(asked["completions"][0]) == set(asked_by_trl["completions"][0]) == {"role", "content"}
        assert type(asked["environments"]) is type(asked_by_trl["environments"]) is Shop

    asyncio.run(play())
    # What it adds up to, by TRL's own code and by ours, of the same two episodes.
    environments = [Shop(), Shop()]
    environments[1].bought = ["apple"]
    trainer.environments = environments
    completions = [[{"role": "assistant", "content": "an apple"}]] * 2
    inputs, prompts = [ROW, ROW], [ROW["prompt"]] * 2
    rewards = trainer._calculate_rewards(inputs, prompts, completions, [[1], [1]])
    sums = (rewards * trainer.reward_weights).nansum(dim=1).tolist()

    async def score(count: int) -> float | None:
        session, _ = await begun(ours)
        for seq in range(1, count + 1):
            await session.step(Action("", (ToolCall("buy", '{"item": "apple"}'),)), seq)
        return (await session.step(Action("an apple"), count + 1)).reward.value

    assert sums == [asyncio.run(score(0)), asyncio.run(score(1))] == [1.0, 3.5]
