"""Tokenizer files as servers hand them out."""

import hashlib

import pytest

from opentinker_kit import tokenizer_files
from opentinker_kit.errors import ServiceError
from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinkerapi.runtime.reasons import Reason


def test_files_come_whole_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "RUN_BYTES", 4)
    contents = {"tokenizer.json": b"0123456789", "empty": b""}
    files = TokenizerFiles(contents)
    listed = {file.name: file for file in files.listing()}
    assert {name: file.size_bytes for name, file in listed.items()} == {"tokenizer.json": 10, "empty": 0}
    assert not any(file.data for file in listed.values())
    runs = list(files.runs([listed["tokenizer.json"].sha256, listed["empty"].sha256]))
    assert [(run.offset, run.data) for run in runs] == [(0, b"0123"), (4, b"4567"), (8, b"89"), (0, b"")]
    assert runs[0].sha256 == hashlib.sha256(contents["tokenizer.json"]).hexdigest()


def test_the_digest_covers_names_and_contents() -> None:
    digests = {
        TokenizerFiles(contents).digest for contents in ({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": b""})
    }
    assert len(digests) == 4


def test_an_unknown_digest_is_refused_before_anything_is_sent() -> None:
    files = TokenizerFiles({"a": b"1"})
    with pytest.raises(ServiceError) as refused:
        files.runs([files.listing()[0].sha256, "0" * 64])
    assert refused.value.reason == Reason.TOKENIZER_NOT_FOUND
