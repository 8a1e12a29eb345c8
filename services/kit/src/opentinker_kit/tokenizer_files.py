"""The files of a model's tokenizer as servers hand them out: listed with digests, streamed in runs."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opentinker_kit.errors import ServiceError
from opentinkerapi.data.v1 import tokenizer_pb2
from opentinkerapi.runtime.reasons import Reason

RUN_BYTES = 1 << 20
"""How much of a file travels in one message."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """One file with its digest."""

    name: str
    sha256: str
    data: bytes


class TokenizerFiles:
    """`contents` maps names to bytes (`models.tokenizer_files`)."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._files = tuple(
            TokenizerFile(name, hashlib.sha256(data).hexdigest(), data)
            for name, data in sorted(contents.items())
        )
        lines = "".join(f"{file.name} {file.sha256}\n" for file in self._files)
        self.digest = hashlib.sha256(lines.encode()).hexdigest()
        """Digest over all files."""

    def listing(self) -> list[tokenizer_pb2.TokenizerFile]:
        """All files, without data."""
        return [_described(file) for file in self._files]

    def runs(self, sha256s: Sequence[str]) -> Iterator[tokenizer_pb2.TokenizerFile]:
        """The files with these digests, piece by piece. TOKENIZER_NOT_FOUND, before the first piece, if one
        is not there.
        """
        return _runs([self._by_digest(sha256) for sha256 in sha256s])

    def _by_digest(self, sha256: str) -> TokenizerFile:
        found = next((file for file in self._files if file.sha256 == sha256), None)
        if found is None:
            text = f"no tokenizer file of this model has the digest {sha256!r}"
            raise ServiceError(Reason.TOKENIZER_NOT_FOUND, text, field="sha256s")
        return found


def _runs(files: Sequence[TokenizerFile]) -> Iterator[tokenizer_pb2.TokenizerFile]:
    for file in files:
        for offset in range(0, max(len(file.data), 1), RUN_BYTES):
            run = _described(file)
            run.offset, run.data = offset, file.data[offset : offset + RUN_BYTES]
            yield run


def _described(file: TokenizerFile) -> tokenizer_pb2.TokenizerFile:
    return tokenizer_pb2.TokenizerFile(name=file.name, sha256=file.sha256, size_bytes=len(file.data))
