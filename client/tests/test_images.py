"""Images in observations: their places in prompts, segments and rows, and how they travel."""

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.tokenizers import CHATML, files
from tokenizers import AddedToken, Tokenizer

from opentinker import errors
from opentinker.environments.base import Environment
from opentinker.environments.content import Content, Image, Json, Message
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.session import EnvironmentSession
from opentinker.environments.sources import LocalEnvironment
from opentinker.environments.types import AGENT, Action, Observation, StepResult
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Batch, Group, Trajectory
from opentinker.sampling.completion import Completion, StopReason
from opentinker.sampling.prompt import PlacedImage, Prompt, chunks, upload_large
from opentinker.training.episodes import train_samples
from opentinker.training.requests import chunks as sample_chunks
from opentinker.training.samples import TrainSample, check
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.runtime.render import ChatTokenizer
from opentinkerapi.runtime.tensors import unpack_ids

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_files(template: str = TEMPLATE) -> dict[str, bytes]:
    made = files(template)
    tokenizer = Tokenizer.from_str(made["tokenizer.json"].decode())
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    config = {"model_type": "qwen2_5_vl", "image_token_id": tokenizer.token_to_id("<|image_pad|>")}
    return {
        **made,
        "tokenizer.json": tokenizer.to_str().encode(),
        "config.json": json.dumps(config).encode(),
        "preprocessor_config.json": json.dumps({"min_pixels": 3136, "max_pixels": 50176}).encode(),
    }


CHAT = ChatTokenizer(vision_files())
assert CHAT.images is not None
PAD = CHAT.images.placeholder


def picture(width: int = 56, height: int = 56, fill: int = 0, size: int = 60) -> Image:
    """What says of itself that it is a PNG of that size; nothing here decodes it."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return Image(header + bytes([fill]) * (size - len(header)))


SMALL, WIDE = picture(), picture(112, 84, fill=1)
"""4 and 12 places."""


class Album(Environment):
    """Shows two pictures, then another one after each answer, three in all."""

    def __init__(self, first: Image = SMALL) -> None:
        self.first = first
        self.turn = 0

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation(["Look: ", self.first, " and ", WIDE, "!"])

    def step(self, action: Action) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(reward=1.0, terminated=True)
        return StepResult(Observation([WIDE, " Again."]), reward=0.0)


class Script:
    """Says the same in each turn, and keeps the prompts."""

    def __init__(self, *, end: bool = True) -> None:
        self.prompts: list[Prompt] = []
        self.end = end

    async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
        assert isinstance(prompt, Prompt)
        self.prompts.append(prompt)
        # A placeholder that the policy sampled is a token like any other.
        ids = [*CHAT.encode("red"), PAD, *([CHAT.eos_ids[0]] if self.end else [])]
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(0, tuple(ids), logprobs, StopReason.END, "red", seed=1)


async def play(script: Script, tokenizer: ChatTokenizer = CHAT, **options: Any) -> Trajectory:
    (session,) = await LocalEnvironment(Album, options).open_group(task={}, seed=0, size=1)
    loop = AgentLoop(
        Renderer(tokenizer),
        script,
        group="g",
        member=0,
        version=1,
        limits=Limits(),
        max_tokens=None,
        context_tokens=10_000,
        temperature=1.0,
    )
    return await played(session, loop)


async def played(session: EnvironmentSession, loop: AgentLoop) -> Trajectory:
    """The episode of the only agent."""
    episode = EpisodeLoop(session, {AGENT: loop}, Limits())
    await episode.begin()
    (trajectory,) = await episode.play()
    return trajectory


def test_a_prompt_has_as_many_placeholders_as_the_model_sees() -> None:
    prompt = Renderer(CHAT).first([Message("user", ["Look: ", SMALL, " and ", WIDE, "!"])])
    text = CHAT.decode([i for i in prompt if i != PAD], skip_special_tokens=False)
    around = "<|vision_start|><|vision_end|>"
    assert text == f"<|im_start|>user\nLook: {around} and {around}!<|im_end|>\n<|im_start|>assistant\n"
    assert [(image.token_count, image.image) for image in prompt.images] == [(4, SMALL), (12, WIDE)]
    for image in prompt.images:
        assert set(prompt[image.start : image.end]) == {PAD}
        assert CHAT.decode([prompt[image.start - 1]], skip_special_tokens=False) == "<|vision_start|>"
    assert prompt.ids.count(PAD) == 16


def test_an_image_token_that_a_user_typed_is_text() -> None:
    prompt = Renderer(CHAT).first([Message("user", ["<|image_pad|>", SMALL])])
    assert prompt.ids.count(PAD) == 4
    assert len(prompt.images) == 1


async def test_a_trajectory_carries_its_images_to_the_rows() -> None:
    script = Script()
    played = await play(script)
    (segment,) = played.segments
    assert [prompt.images for prompt in script.prompts] == [segment.images[:2], segment.images]
    assert [image.image for image in segment.images] == [SMALL, WIDE, WIDE]
    for image in segment.images:
        assert segment.token_ids[image.start : image.end] == (PAD,) * image.token_count
        assert not any(segment.loss_mask[image.start : image.end])
    sampled = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert sampled.count(PAD) == 2

    group = Group("g", 0, {}, 0, (played,))
    (row,) = train_samples(Batch(0, 1, (group,)))
    check([row])
    wire = row.to_wire()
    places = [
        chunk.image.token_count if chunk.HasField("image") else len(unpack_ids(chunk.tokens.token_ids))
        for chunk in wire.chunks
    ]
    assert sum(places) == len(row.token_ids) == len(wire.loss_mask)
    assert [chunk.image.image.inline for chunk in wire.chunks if chunk.HasField("image")] == [
        image.image.data for image in segment.images
    ]


async def test_images_nobody_spoke_after_are_not_trained_on() -> None:
    class Ends(Album):
        def step(self, action: Action) -> StepResult:
            return StepResult(Observation([WIDE]), reward=0.0, truncated=True)

    (session,) = await LocalEnvironment(Ends, {}).open_group(task={}, seed=0, size=1)
    loop = AgentLoop(
        Renderer(CHAT), Script(), group="g", member=0, version=1, limits=Limits(),
        max_tokens=None, context_tokens=0, temperature=1.0,
    )  # fmt: skip
    (segment,) = (await played(session, loop)).segments
    assert [image.image for image in segment.images] == [SMALL, WIDE]
    assert segment.images[-1].end < len(segment.token_ids)


def test_prompts_of_equal_ids_and_other_images_differ() -> None:
    """Members of a group share a request only where they see the same."""
    ids = [1, PAD, PAD, PAD, PAD, 2]
    first, second = (Prompt(ids, [PlacedImage(1, 4, picture(fill=fill))]) for fill in (0, 1))
    assert first != second
    assert first == Prompt(ids, [PlacedImage(1, 4, picture(fill=0))])
    assert first != ids
    assert Prompt(ids) == ids


@pytest.mark.parametrize(
    ("template", "image", "text"),
    [
        (TEMPLATE.replace("<|image_pad|>", ""), SMALL, "shows 0 of 1 images"),
        (TEMPLATE, Image(b"GIF89a"), "none of image/png"),
        (TEMPLATE, picture(1, 300), "200 times"),
        (TEMPLATE, picture(1 << 14, 1 << 14), "over the"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused(template: str, image: Image, text: str) -> None:
    renderer = Renderer(ChatTokenizer(vision_files(template)))
    with pytest.raises(errors.InvalidArgument, match=text):
        renderer.first([Message("user", [image])])


def test_a_model_without_images_refuses_them() -> None:
    """Whatever its template would make of a list of parts."""
    concatenates = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    for template in (CHATML, concatenates, None):
        with pytest.raises(errors.UnsupportedOption, match="takes none"):
            Renderer(ChatTokenizer(files(template))).first([Message("user", [SMALL])])
    without_template = {**vision_files(), "tokenizer_config.json": b"{}"}
    with pytest.raises(errors.UnsupportedOption, match="no chat template"):
        Renderer(ChatTokenizer(without_template)).first([Message("user", [SMALL])])


def test_content_with_images_is_a_list_of_parts_for_templates() -> None:
    content = Content.of(["a", SMALL, Json.of({"b": 1})])
    expected = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": '{"b":1}'}]
    assert Message("user", content).to_dict()["content"] == expected
    assert Message("user", "plain").to_dict()["content"] == "plain"
    with pytest.raises(InvalidEpisodeData, match="bytes is over"):
        Image(bytes(16 * 1024 * 1024 + 1))


class Uploads:
    def __init__(self) -> None:
        self.data: list[bytes] = []

    async def upload(self, data: bytes) -> blob_pb2.BlobRef:
        self.data.append(data)
        return blob_pb2.BlobRef(sha256="0" * 64, size_bytes=len(data))


async def test_large_images_are_uploaded_alone_or_together() -> None:
    mebibyte = 1024 * 1024
    sizes = [2 * mebibyte + 1, *[2 * mebibyte] * 5]
    placed = [PlacedImage(i, 1, picture(size=size)) for i, size in enumerate(sizes)]
    uploads = Uploads()
    parts = chunks([PAD] * len(sizes), placed)
    await upload_large(parts, uploads)
    assert [part.image.image.WhichOneof("source") for part in parts] == [
        "blob", "inline", "inline", "inline", "inline", "blob",
    ]  # fmt: skip
    assert [len(data) for data in uploads.data] == [sizes[0], sizes[5]]

    row = TrainSample([PAD, 1, 2], [0, 0, 1], images=[PlacedImage(0, 1, picture(size=3 * mebibyte))])
    (chunk,) = await sample_chunks([row], uploads)  # type: ignore[arg-type]
    assert chunk.samples[0].chunks[0].image.image.WhichOneof("source") == "blob"


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (PlacedImage(3, 2, SMALL), "takes places 3 to 4 of 4"),
        (PlacedImage(1, 3, SMALL), "loss_mask is 1 at a place of image 0"),
    ],
)
def test_malformed_rows_are_refused_before_they_are_sent(image: PlacedImage, text: str) -> None:
    with pytest.raises(errors.InvalidSample, match=text):
        check([TrainSample([1, PAD, PAD, 2], [0, 0, 0, 1], images=[image])])
