"""How far a stream of tokens was read, so that it can be taken up where it broke off."""

from dataclasses import dataclass, field

from opentinker import errors
from opentinker.sampling.completion import Completion, Delta


@dataclass(slots=True)
class _Read:
    """Of one completion."""

    token_ids: list[int] = field(default_factory=list)
    """What was given."""
    characters: int = 0
    at_token: int = 0
    """How much of it the stream that is read now has repeated."""
    at_character: int = 0


class Reading:
    """The deltas and completions of one request, each once, whatever its streams repeat."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        """Completions that were given."""
        self._read: dict[int, _Read] = {}

    def begin(self) -> None:
        """Another stream begins, with the first token."""
        for read in self._read.values():
            read.at_token = read.at_character = 0

    def delta(self, delta: Delta) -> Delta | None:
        """What of it is new. Unavailable if what is not differs from what was given."""
        if delta.index in self.finished:
            return None
        read = self._read.setdefault(delta.index, _Read())
        known = min(len(read.token_ids) - read.at_token, len(delta.token_ids))
        if list(delta.token_ids[:known]) != read.token_ids[read.at_token : read.at_token + known]:
            raise errors.Unavailable(
                "the server was lost, and another one sampled other tokens than had come; sample again",
                reason=errors.Reason.CONNECTION_LOST,
            )
        said = min(read.characters - read.at_character, len(delta.text))
        read.at_token += len(delta.token_ids)
        read.at_character += len(delta.text)
        read.token_ids += delta.token_ids[known:]
        read.characters = max(read.characters, read.at_character)
        if known == len(delta.token_ids) and said == len(delta.text):
            return None
        return delta.after(known, said) if known or said else delta

    def completion(self, completion: Completion) -> bool:
        """Whether it is new."""
        new = completion.index not in self.finished
        self.finished.add(completion.index)
        self._read.pop(completion.index, None)
        return new
