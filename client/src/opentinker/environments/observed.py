"""What an observation may hold: text that can be written down, and not more of it than travels.

Checked where an episode is played, so that what ends it on env_host ends it in this process too.
"""

from opentinker.environments.content import Array, Image, Json, Text
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.types import Observation

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Text and JSON of one observation, far more than any context holds."""


def check_observation(observation: Observation) -> None:
    """InvalidEpisodeData for what no agent can be shown."""
    size = sum(map(_size, observation.legal_actions))
    for message in observation.as_messages():
        for part in message.content.parts:
            if isinstance(part, Text | Json):
                size += _size(part.text)
            elif not isinstance(part, Image | Array):
                raise InvalidEpisodeData(
                    f"a part of an observation must not be of type {type(part).__name__}"
                )
        for call in message.tool_calls:
            size += _size(call.name) + _size(call.arguments) + _size(call.id)
        size += _size(message.name) + _size(message.tool_call_id)
    if size > MAX_TEXT_BYTES:
        raise InvalidEpisodeData(f"an observation of {size} bytes of text is over the {MAX_TEXT_BYTES}")


def _size(text: object) -> int:
    if not isinstance(text, str):
        raise InvalidEpisodeData(f"text must be str, not {type(text).__name__}")
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidEpisodeData(f"text with half a character in it: {error}") from None
