"""`fit()` of a vision-language policy on the real stack: transformers engine, tiny Qwen2.5-VL, float32."""

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import opentinker as ot
from opentinker import errors
from opentinker.environments import Image
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Batch, Segment
from opentinker.sampling.prompt import PlacedImage, Prompt
from opentinker.training.episodes import train_samples
from opentinker.training.samples import TrainSample
from opentinker_kit.images import patches
from opentinker_kit.models import image_settings
from opentinker_kit.testing.vision import png
from opentinkerapi.runtime.images import INLINE_MAX_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class WhichColour(ot.Environment):
    """Shows a square and asks for its colour, then a wider one of another colour."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.answers = [task["colour"], task["then"]]
        square = Image(png(COLOURS[self.answers[0]]))
        return ot.Observation(["Which colour is the square?", square])

    def step(self, action: ot.Action) -> ot.StepResult:
        word = self.answers.pop(0)
        # How near the first letter is: random weights must earn rewards that differ.
        said = ord(action.text[0]) if action.text else 0
        reward = 1.0 - min(abs(said - ord(word[0])), 256) / 256
        if not self.answers:
            return ot.StepResult(reward=reward, terminated=True)
        square = Image(png(COLOURS[self.answers[0]], 112, 84))
        return ot.StepResult(ot.Observation([square, " And this one?"]), reward=reward)

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        names = list(COLOURS)
        return [{"colour": one, "then": names[(at + 1) % 3]} for at, one in enumerate(names)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


@pytest.fixture(scope="module")
def result(
    cluster: ot.Cluster, tiny_vision_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> ot.FitResult:
    return ot.fit(
        env=WhichColour,
        model=str(tiny_vision_model_dir),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=3,
        steps=2,
        learning_rate=1e-2,
        sampling=ot.SamplingParams(max_tokens=4),
        seed=5,
        run_dir=tmp_path_factory.mktemp("run"),
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )


@pytest.fixture(scope="module")
def policy(result: ot.FitResult) -> ot.Policy:
    return result.policy


@pytest.fixture(scope="module")
def batch(policy: ot.Policy) -> Batch:
    """Of the trained version."""
    params = ot.SamplingParams(max_tokens=4)

    async def first() -> Batch:
        return await anext(
            ot.rollouts(policy, WhichColour, groups=3, group_size=2, params=params, shuffle=False)
        )

    return asyncio.run(first())


def segments(batch: Batch) -> list[Segment]:
    return [segment for trajectory in batch for segment in trajectory.segments]


def test_two_steps_train_on_what_was_seen(result: ot.FitResult) -> None:
    assert result.steps == result.version == 2
    for row in result.metrics:
        assert row["num_turns/max"] == 2
        assert row["actor/grad_norm"] > 0
        # Trainer and sampler agree about tokens after images, both float32.
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4


def test_images_are_in_prompts_and_rows_at_their_places(
    policy: ot.Policy, batch: Batch, tiny_vision_model_dir: Path
) -> None:
    settings = image_settings(tiny_vision_model_dir)
    assert settings is not None
    played = segments(batch)
    assert len(played) == 6
    for segment, colour in zip(played, [name for name in COLOURS for _ in range(2)], strict=True):
        assert [image.token_count for image in segment.images] == [4, 12]
        assert segment.images[0].image.data == png(COLOURS[colour])
        for image in segment.images:
            places = segment.token_ids[image.start : image.end]
            assert set(places) == {settings.placeholder}
    rows = train_samples(batch)
    assert [row.images for row in rows] == [segment.images for segment in played]
    # Both turns: the second one's positions follow two images and a sampled reply.
    scores = policy.forward(rows).result().logprobs
    for segment, trained in zip(played, scores, strict=True):
        assert trained is not None
        mask = np.asarray(segment.loss_mask, dtype=bool)
        np.testing.assert_allclose(trained[mask], segment.logprobs[mask], atol=1e-4)


def test_sampler_and_trainer_give_transformers_numbers(
    policy: ot.Policy, batch: Batch, tiny_vision_model_dir: Path
) -> None:
    """At version 0 the adapter changes nothing, so the base model is the reference."""
    import torch
    from transformers import AutoModelForImageTextToText

    settings = image_settings(tiny_vision_model_dir)
    assert settings is not None
    segment = segments(batch)[0]
    given = [patches(image.image.data, settings) for image in segment.images]
    ids = torch.tensor([segment.token_ids])
    types = torch.zeros_like(ids)
    for image in segment.images:
        types[0, image.start : image.end] = 1
    model = AutoModelForImageTextToText.from_pretrained(tiny_vision_model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=torch.from_numpy(np.concatenate([each.values for each in given])),
            image_grid_thw=torch.tensor([[1, each.rows, each.columns] for each in given]),
            mm_token_type_ids=types,
        ).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    prompt = Prompt(segment.token_ids, segment.images)
    sampler = policy.score([prompt], version=0).result()[0]
    np.testing.assert_allclose(sampler[1:], expected, atol=1e-4)
    row = TrainSample(prompt, segment.loss_mask)
    (trainer,) = policy.forward([row], base_model=True).result().logprobs
    assert trainer is not None
    mask = np.asarray(segment.loss_mask, dtype=bool)
    np.testing.assert_allclose(trainer[mask], expected[mask[1:]], atol=1e-5)


def test_the_picture_is_looked_at(policy: ot.Policy) -> None:
    renderer = Renderer(policy.tokenizer().result())
    question = "Which colour is the square?"
    prompts = [
        renderer.first([ot.Message("user", [question, Image(png(colour))])]) for colour in COLOURS.values()
    ]
    assert len({prompt.ids for prompt in prompts}) == 1
    red, green, blue = (scores[-1] for scores in policy.score(prompts).result())
    assert min(abs(red - green), abs(green - blue), abs(red - blue)) > 1e-3
    assert isinstance(policy.chat([ot.Message("user", [question, Image(png((9, 9, 9)))])]).result(), str)


def test_sft_teaches_to_name_what_is_seen(
    cluster: ot.Cluster, tiny_vision_model_dir: Path, tmp_path: Path
) -> None:
    """From random weights; the text of the prompt is the same in all rows, so only the image tells."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": ["Which colour?", Image(png(colour))]},
                {"role": "assistant", "content": name},
            ]
        }
        for name, colour in COLOURS.items()
    ]
    result = ot.sft(
        rows,
        str(tiny_vision_model_dir),
        tuning=ot.Full(),
        epochs=40,
        batch_size=3,
        learning_rate=3e-3,
        evaluation=rows,
        run_dir=tmp_path / "run",
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    before, after = result.evaluations[0][1], result.evaluations[-1][1]
    assert after.tokens == before.tokens == sum(len(name) + 1 for name in COLOURS)
    assert after.loss < 0.1 < 1 < before.loss
    for row in rows:
        asked, answer = row["messages"]
        question = ot.Message("user", asked["content"])
        greedy = ot.SamplingParams(temperature=0, max_tokens=8)
        assert result.policy.chat([question], greedy).result() == answer["content"]


def test_a_large_image_travels_by_blob(policy: ot.Policy) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    image = Image(buffer.getvalue())
    assert len(image.data) > INLINE_MAX_BYTES
    renderer = Renderer(policy.tokenizer().result())
    prompt = renderer.first([ot.Message("user", ["What is it?", image])])
    sampler = policy.score([prompt]).result()[0]
    mask = [0] * (len(prompt) - 5) + [1] * 5
    (trainer,) = policy.forward([TrainSample(prompt, mask)]).result().logprobs
    assert trainer is not None
    np.testing.assert_allclose(trainer[-5:], sampler[-5:], atol=1e-4)


def test_bad_images_are_refused_and_change_nothing(policy: ot.Policy) -> None:
    text = TrainSample([65, 66, 67], [0, 1, 1])
    known = policy.forward([text]).result().logprobs[0]
    square = png((255, 0, 0))
    placed = PlacedImage(1, 4, Image(square[: len(square) // 2]))
    ids = [65, *[policy_placeholder(policy)] * 4, 66]
    row = TrainSample(ids, [0, 0, 0, 0, 0, 1], images=[placed])
    with pytest.raises(errors.InvalidSample, match="cannot be decoded") as caught:
        policy.forward_backward([text, row], ot.CrossEntropy()).result()
    assert caught.value.metadata["index"] == "1"
    with pytest.raises(errors.InvalidArgument, match="cannot be decoded"):
        policy.score([Prompt(ids, [placed])]).result()
    wrong = PlacedImage(1, 4, Image(png((255, 0, 0), 112, 84)))
    with pytest.raises(errors.InvalidSample, match="takes 12 places"):
        policy.forward([TrainSample(ids, [0, 0, 0, 0, 0, 1], images=[wrong])]).result()
    np.testing.assert_array_equal(policy.forward([text]).result().logprobs[0], known)


def policy_placeholder(policy: ot.Policy) -> int:
    images = policy.tokenizer().result().images
    assert images is not None
    return int(images.placeholder)


def test_the_record_of_the_run_is_written(result: ot.FitResult) -> None:
    lines = (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "actor/grad_norm" in line] == [1, 2]
