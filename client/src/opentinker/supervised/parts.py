"""What the content of a message in a data set may be: a text, or a list of parts.

    "2 + 2?"
    ["Which colour is the square?", ot.Image(png)]
    [{"type": "text", "text": "Which colour?"}, {"type": "image", "image": ot.Image(png)}]
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}]         OpenAI's, for files

Nothing is fetched: an image is in the row.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from opentinker.environments.content import Content, Image, Text
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.errors import invalid

_SCHEME, _BASE64 = "data:", ";base64"


def read_content(value: Any, field: str) -> Content:
    """A content of text parts and images. InvalidArgument naming the part."""
    if isinstance(value, str):
        return Content((Text(value),))
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        parts = tuple(_part(part, f"{field}[{index}]") for index, part in enumerate(value))
        # One text, as a string would be: templates may take lists for something else.
        texts = [part.text for part in parts if isinstance(part, Text)]
        return Content((Text("".join(texts)),) if len(texts) == len(parts) else parts)
    raise invalid(field, f"must be a text or a list of parts, not {type(value).__name__}")


def _part(value: Any, field: str) -> Text | Image:
    if isinstance(value, Image):
        return value
    if isinstance(value, str):
        return Text(value)
    if not isinstance(value, Mapping):
        raise invalid(field, f"a part is a text, an ot.Image or a mapping, not {type(value).__name__}")
    given = {key: item for key, item in value.items() if item is not None}
    kind = given.pop("type", None)
    if kind not in ("text", "image", "image_url") or set(given) != {kind}:
        raise invalid(
            field,
            'a part is {"type": "text", "text": ...}, {"type": "image", "image": ot.Image(...)} or '
            '{"type": "image_url", "image_url": {"url": "data:..."}}',
        )
    if kind == "text":
        if not isinstance(given["text"], str):
            raise invalid(f"{field}.text", f"must be a text, not {type(given['text']).__name__}")
        return Text(given["text"])
    if kind == "image":
        if not isinstance(given["image"], Image):
            raise invalid(f"{field}.image", f"must be an ot.Image, not {type(given['image']).__name__}")
        return given["image"]
    return _of_url(given["image_url"], f"{field}.image_url")


def _of_url(value: Any, field: str) -> Image:
    url = value.get("url") if isinstance(value, Mapping) else None
    if not isinstance(url, str) or not url.startswith(_SCHEME):
        raise invalid(field, 'must be {"url": "data:image/png;base64,..."}: nothing is fetched')
    head, comma, data = url[len(_SCHEME) :].partition(",")
    if not comma or not head.endswith(_BASE64):
        raise invalid(field, "a data URL here is data:<media type>;base64,<data>")
    try:
        return Image(base64.b64decode(data, validate=True), head.removesuffix(_BASE64))
    except (binascii.Error, InvalidEpisodeData) as error:
        raise invalid(field, str(error)) from None
