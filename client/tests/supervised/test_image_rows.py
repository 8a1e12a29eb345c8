"""Rows with images: the same prompt as the sampler's, images at their places, and what is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.tokenizers import CHATML, files
from client.tests.test_images import CHAT, PAD, SMALL, TEMPLATE, WIDE, picture, vision_files

from opentinker.environments.content import Message
from opentinker.errors import InvalidArgument, UnsupportedOption
from opentinker.rollout.renderer import Renderer
from opentinker.supervised.data import read
from opentinker.supervised.encoding import Encoding, Example, encode
from opentinker.supervised.rows import supervised_samples
from opentinkerapi.runtime.render import ChatTokenizer

ASKED = ["Look: ", SMALL, " and ", WIDE, "!"]
ROW = {
    "messages": [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [WIDE, "again <|image_pad|>"]},
        {"role": "assistant", "content": "blue"},
    ]
}


def examples(row: Any, tokenizer: ChatTokenizer = CHAT, max_tokens: int = 500, **how: Any) -> list[Example]:
    return list(encode(read([row], "data"), tokenizer, Encoding(max_tokens, **how)).items)


def test_a_row_is_the_prompt_that_the_sampler_gets_and_the_reply() -> None:
    (example,) = examples({"messages": ROW["messages"][:2]})
    prompt = Renderer(CHAT).first([Message("user", ASKED)])
    reply = [*CHAT.encode("red"), CHAT.eos_ids[0]]
    assert example.token_ids.tolist() == [*prompt.ids, *reply]
    assert example.images == prompt.images
    assert [image.token_count for image in example.images] == [4, 12]
    assert example.weights.tolist() == [0.0] * len(prompt) + [1.0] * len(reply)
    sample = example.sample()
    assert sample.images == prompt.images
    assert sum(sample.loss_mask) == len(reply)


def test_later_images_stand_at_their_places_and_spelled_placeholders_are_text() -> None:
    (example,) = examples(ROW)
    places = np.flatnonzero(example.token_ids == PAD)
    assert places.tolist() == [at for image in example.images for at in range(image.start, image.end)]
    assert [image.image for image in example.images] == [SMALL, WIDE, WIDE]
    assert not example.weights[places].any()
    said = CHAT.decode(example.token_ids[example.weights != 0].tolist())
    assert said == "redblue"
    # What nothing is learned behind is left out, with its images.
    (short,) = examples({"messages": [*ROW["messages"][:3], {**ROW["messages"][3], "train": False}]})
    assert [image.image for image in short.images] == [SMALL, WIDE]


def test_split_rows_have_the_images_of_their_part() -> None:
    strips = TEMPLATE.replace(
        "{% if m['content'] is string %}{{ m['content'] }}",
        "{% if m['role'] == 'assistant' and not loop.last %}…"
        "{% elif m['content'] is string %}{{ m['content'] }}",
    )
    parts = examples(ROW, ChatTokenizer(vision_files(strips)), rewritten_history="split")
    assert [[image.image for image in part.images] for part in parts] == [[SMALL, WIDE], [SMALL, WIDE, WIDE]]


def test_ways_to_say_an_image(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(SMALL.data).decode()
    question = {"type": "text", "text": "What?", "image": None}
    rows = []
    for part in (SMALL, {"type": "image", "image": SMALL}, {"type": "image_url", "image_url": {"url": url}}):
        user = {"role": "user", "content": [question, part]}
        rows.append({"messages": [user, {"role": "assistant", "content": "red"}]})
    first, second, third = (examples(row)[0] for row in rows)
    assert first.images == second.images == third.images
    assert first.token_ids.tolist() == second.token_ids.tolist() == third.token_ids.tolist()
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[2]) + "\n")
    (sample,) = supervised_samples(path, CHAT, max_tokens=500)
    assert sample.images == first.images


def test_images_count_in_lengths_and_digests() -> None:
    (example,) = examples(ROW)
    with pytest.raises(InvalidArgument, match=f"has {len(example.token_ids)} tokens"):
        examples(ROW, max_tokens=len(example.token_ids) - 1)
    digests = set()
    for image in (SMALL, picture(fill=7)):
        user = {"role": "user", "content": [image]}
        rows = read([{"messages": [user, {"role": "assistant", "content": "red"}]}], "data")
        digests.add(encode(rows, CHAT, Encoding(500)).digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("part", "field", "says"),
    [
        ({"type": "image"}, "[1]", "a part is"),
        ({"type": "image", "image": b"\x89PNG"}, "[1].image", "must be an ot.Image, not bytes"),
        ({"type": "video", "video": "x"}, "[1]", "a part is"),
        (7, "[1]", "not int"),
        ({"type": "text", "text": 7}, "[1].text", "must be a text"),
        ({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, "[1].image_url", "is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,AA"}}, "[1].image_url", "base64,<data>"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}, "[1].image_url", "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/gif;base64,AA=="}}, "[1].image_url", "gif"),
    ],
)
def test_bad_parts_are_refused_by_their_place(part: Any, field: str, says: str) -> None:
    row = {"messages": [{"role": "user", "content": ["x", part]}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(InvalidArgument, match=says) as refused:
        read([row], "data")
    assert refused.value.field == f"data[0].messages[0].content{field}"


def test_models_and_messages_that_cannot_hold_one() -> None:
    with pytest.raises(UnsupportedOption, match="holds an image and the model takes none") as refused:
        examples(ROW, ChatTokenizer(files(CHATML)))
    assert refused.value.field == "data[0]"
    blind = TEMPLATE.replace("<|image_pad|>", "")
    with pytest.raises(InvalidArgument, match="shows 0 of 3 images"):
        examples(ROW, ChatTokenizer(vision_files(blind)))
    with pytest.raises(InvalidArgument, match="models say text only"):
        read([{"messages": [{"role": "assistant", "content": [SMALL]}]}], "data")
    broken = {"role": "user", "content": [picture(width=0)]}
    with pytest.raises(InvalidArgument, match="cannot be used"):
        examples({"messages": [broken, {"role": "assistant", "content": "y"}]})
