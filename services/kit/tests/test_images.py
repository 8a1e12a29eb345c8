"""Images: what transformers' own processor makes of them, their positions, and what is refused."""

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from opentinker_kit.images import Grid, decode, patches, position_ids
from opentinker_kit.models import tokenizer_files
from opentinker_kit.testing.vision import MAX_PIXELS, MIN_PIXELS, build_tiny_qwen2_5_vl, png
from opentinkerapi.runtime import images
from opentinkerapi.runtime.images import ImageError, ImageSettings, check_size

SETTINGS = ImageSettings(placeholder=5, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
SIZES = [(56, 56), (28, 28), (1, 1), (37, 200), (300, 61), (640, 480), (42, 70), (13, 2000)]


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    generator = np.random.default_rng(width * 10_000 + height)
    pixels = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = PIL.Image.fromarray(pixels)
    if "A" not in mode:
        image = image.convert("RGB")
    image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


KINDS = [
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "L", {}),
    ("PNG", "P", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "CMYK", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {}),
]


@pytest.mark.parametrize(("kind", "mode", "options"), KINDS)
@pytest.mark.parametrize("size", [(56, 56), (37, 200), (640, 480)])
def test_patches_equal_those_of_transformers_bit_for_bit(
    kind: str, mode: str, options: dict[str, object], size: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    data = encoded(*size, kind, mode, **options)
    theirs = Qwen2VLImageProcessorPil(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)(
        images=[PIL.Image.open(io.BytesIO(data))], return_tensors="np"
    )
    ours = patches(data, SETTINGS)
    assert np.array_equal(ours.values, theirs["pixel_values"])
    assert theirs["image_grid_thw"].tolist() == [[1, ours.rows, ours.columns]]
    assert SETTINGS.token_count(*size) == ours.rows * ours.columns // 4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "mode", "options"), KINDS)
def test_a_header_tells_what_decoding_finds(
    kind: str, mode: str, options: dict[str, object], size: tuple[int, int]
) -> None:
    data = encoded(*size, kind, mode, **options)
    assert check_size(data) == size == decode(data).size
    assert images.media_type(data) == f"image/{kind.lower()}"


@pytest.mark.parametrize("size", SIZES)
def test_a_turned_image_takes_as_many_positions(size: tuple[int, int]) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = encoded(*size, "JPEG", exif=exif)
    assert decode(data).size == size[::-1]
    assert SETTINGS.token_count(*check_size(data)) == SETTINGS.token_count(*decode(data).size)


def test_positions_by_hand() -> None:
    """Two tokens, an image of 2 x 3 positions, one token, an image of 1 x 1, two tokens."""
    got = position_ids(12, [Grid(2, 2, 3), Grid(9, 1, 1)])
    assert got.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert position_ids(3, []).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "none of image/png"),
        (b"GIF89a" + bytes(20), "none of image/png"),
        (png((255, 0, 0))[:20], "ends within its header"),
        (png((255, 0, 0))[:-30], "cannot be decoded"),
        (encoded(64, 64, "JPEG")[:100], "ends within its header"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + b"\x00\x00\xff\xff\x00\x00\xff\xff", "over the"),
        (b"\x89PNG\r\n\x1a\n" + bytes(16), "0 x 0"),
        (bytes(images.MAX_BYTES + 1), "bytes are over"),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(data: bytes, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        decode(data)


def test_an_extreme_aspect_is_refused() -> None:
    with pytest.raises(ImageError, match="200 times"):
        SETTINGS.token_count(201, 1)
    assert SETTINGS.token_count(200, 1) > 0


def test_settings_come_from_the_models_files(tmp_path: Path, tiny_model_dir: Path) -> None:
    files = tokenizer_files(build_tiny_qwen2_5_vl(tmp_path))
    settings = ImageSettings.of_files(files)
    assert settings is not None
    assert (settings.min_pixels, settings.max_pixels) == (MIN_PIXELS, MAX_PIXELS)
    assert settings.placeholder == json.loads(files["config.json"])["image_token_id"]
    assert ImageSettings.of_files(tokenizer_files(tiny_model_dir)) is None


def test_both_spellings_of_the_bounds_are_read_and_what_is_not_honoured_is_refused(tmp_path: Path) -> None:
    files = tokenizer_files(build_tiny_qwen2_5_vl(tmp_path))
    given = json.loads(files.pop("preprocessor_config.json"))
    del given["min_pixels"], given["max_pixels"]
    given["size"] = {"shortest_edge": 3136, "longest_edge": 6272}
    files["processor_config.json"] = json.dumps({"image_processor": given}).encode()
    settings = ImageSettings.of_files(files)
    assert settings is not None
    assert settings.max_pixels == 6272
    given["do_normalize"] = False
    files["processor_config.json"] = json.dumps({"image_processor": given}).encode()
    with pytest.raises(ImageError, match="do_normalize"):
        ImageSettings.of_files(files)
