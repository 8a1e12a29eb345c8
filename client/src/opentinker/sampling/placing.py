"""Images among the ids that a chat template makes. The template writes one placeholder for an image; the
model sees as many as the image takes places.
"""

from collections.abc import Sequence
from typing import Protocol

from opentinker import errors
from opentinker.environments.content import Image
from opentinker.sampling.prompt import PlacedImage, Prompt
from opentinkerapi.runtime.images import ImageError, ImageSettings, check_size


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `opentinkerapi.runtime.render.ChatTokenizer` has it."""

    @property
    def images(self) -> ImageSettings | None: ...

    @property
    def has_template(self) -> bool: ...


def check_takes_images(tokenizer: Tokenizer, what: str, field: str) -> None:
    """UnsupportedOption where the model takes no images. Ask before a template sees them: one that knows none
    may do anything.
    """
    problem = ""
    if tokenizer.images is None:
        problem = "the model takes none"
    elif not tokenizer.has_template:
        problem = "the model has no chat template to show it in"
    if problem:
        raise errors.UnsupportedOption(
            f"{what} holds an image and {problem}", reason=errors.Reason.UNSUPPORTED_OPTION, field=field
        )


def place_images(
    ids: Sequence[int], images: Sequence[Image], tokenizer: Tokenizer, field: str, template: str = ""
) -> Prompt:
    """The ids with each placeholder repeated for the places of its image. InvalidArgument where there are
    more or fewer placeholders than images, and for an image that is malformed. `template` names it in errors.
    """
    if not images:
        return Prompt(ids)
    settings = tokenizer.images
    assert settings is not None, "refused before rendering"
    shown = list(ids).count(settings.placeholder)
    if shown != len(images):
        named = f" ({template})" if template else ""
        raise errors.invalid(field, f"the chat template shows {shown} of {len(images)} images{named}")
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    for token_id in ids:
        count = 1
        if token_id == settings.placeholder:
            image = images[len(placed)]
            count = _token_count(image, settings, field)
            placed.append(PlacedImage(len(expanded), count, image))
        expanded += [token_id] * count
    return Prompt(expanded, placed)


def _token_count(image: Image, settings: ImageSettings, field: str) -> int:
    try:
        return settings.token_count(*check_size(image.data))
    except ImageError as error:
        raise errors.invalid(field, f"an image cannot be used: {error}") from error
