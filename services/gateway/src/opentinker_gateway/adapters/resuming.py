"""What of a stream that begins anew has been passed on already.

A StreamSample that broke off is asked for again under its request id, perhaps of another server, and begins
with its first token. What came before must come again, token for token; it is left out here.
"""

from dataclasses import dataclass, field

from opentinker_gateway.domain.sampling import Delta, Finished
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class Diverged(ServiceError):
    """The replacement of a server that was lost does not say the same. Asking it again would not help."""

    def __init__(self) -> None:
        super().__init__(
            Reason.ENGINE_CRASHED,
            "the server was lost in the middle of a reply and its replacement does not say the same; "
            "ask again",
        )


@dataclass(slots=True)
class _Passed:
    """Of one completion: what was passed on, and how much of that has come again."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    again: int = 0
    text_again: int = 0
    finished: bool = False


class Resumed:
    """Filters the events of one request over several tries."""

    def __init__(self) -> None:
        self._passed: dict[int, _Passed] = {}

    def begin(self) -> None:
        """A try begins."""
        for passed in self._passed.values():
            passed.again = passed.text_again = 0

    @property
    def finished(self) -> int:
        """Completions that were passed on whole."""
        return sum(passed.finished for passed in self._passed.values())

    def delta(self, delta: Delta) -> Delta | None:
        """What is new of it. Diverged if this try says something else than an earlier one."""
        passed = self._passed.setdefault(delta.index, _Passed())
        repeated = min(len(delta.tokens.ids), len(passed.ids) - passed.again)
        old_text = min(len(delta.text), len(passed.text) - passed.text_again)
        same = list(delta.tokens.ids[:repeated]) == passed.ids[passed.again : passed.again + repeated]
        if not same or not passed.text.startswith(delta.text[:old_text], passed.text_again):
            raise Diverged
        passed.again += len(delta.tokens.ids)
        passed.text_again += len(delta.text)
        new = Delta(delta.index, delta.text[old_text:], delta.tokens.after(repeated))
        passed.ids += new.tokens.ids
        passed.text += new.text
        return new if new.tokens.ids or new.text else None

    def completion(self, finished: Finished) -> Finished | None:
        """The completion, once."""
        passed = self._passed.setdefault(finished.index, _Passed())
        if passed.finished:
            return None
        passed.finished = True
        return finished
