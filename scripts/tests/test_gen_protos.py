"""The check that generated code is fresh sees each way in which it may not be."""

from pathlib import Path

import pytest

from scripts import gen_protos


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(fresh, committed), equal to begin with."""
    for name in ("fresh", "committed"):
        (tmp_path / name / "a" / "v1").mkdir(parents=True)
        (tmp_path / name / "a" / "v1" / "x_pb2.py").write_text("x = 1\n")
    return tmp_path / "fresh", tmp_path / "committed"


def test_equal_folders_do_not_differ(folders: tuple[Path, Path]) -> None:
    assert gen_protos.differences(*folders) == []


def test_missing_stale_and_changed_files_are_named_and_mended(folders: tuple[Path, Path]) -> None:
    fresh, committed = folders
    (fresh / "new_pb2.py").write_text("new\n")
    (committed / "old").mkdir()
    (committed / "old" / "gone_pb2.py").write_text("gone\n")
    (committed / "a" / "v1" / "x_pb2.py").write_text("x = 2\n")
    assert gen_protos.differences(fresh, committed) == [
        "differs: a/v1/x_pb2.py",
        "missing: new_pb2.py",
        "stale: old/gone_pb2.py",
    ]
    gen_protos.install(fresh, committed)
    assert gen_protos.differences(fresh, committed) == []
    assert not (committed / "old").exists()


def test_generation_is_the_same_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        gen_protos.generate(tmp_path / name)
    assert gen_protos.differences(tmp_path / "one", tmp_path / "two") == []
