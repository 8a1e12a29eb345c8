"""Where settings come from, and what is refused."""

import json
from pathlib import Path

import pytest

from opentinker_kit.files import make_key_file
from opentinker_kit.settings import ServerSettings, load_settings, read_secret


class Settings(ServerSettings):
    """Settings of a server under test."""

    workers: int = 1


def write(path: Path, **values: object) -> list[str]:
    path.write_text(json.dumps(values))
    return ["--settings", str(path)]


def test_the_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_WORKERS", "3")
    settings = load_settings(Settings, write(tmp_path / "s.json", workers=2, instance_id="one"))
    assert (settings.workers, settings.instance_id) == (3, "one")


def test_nested_settings_can_be_completed_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = {"endpoint": "127.0.0.1:1", "access_key": "a", "secret_key_file": "k", "bucket": "one"}
    monkeypatch.setenv("OPENTINKER_S3__BUCKET", "two")
    settings = load_settings(Settings, write(tmp_path / "s.json", s3=s3))
    assert settings.s3 is not None
    assert (settings.s3.endpoint, settings.s3.bucket) == ("127.0.0.1:1", "two")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"wrokers": 2}', "wrokers"),
        ("[1]", "one JSON object"),
        ("{", "no JSON"),
        ('{"listen_port": 70000}', "65535"),
    ],
)
def test_wrong_settings_end_the_start_with_a_readable_text(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        load_settings(Settings, ["--settings", str(path)])
    assert text in capsys.readouterr().err


def test_a_missing_settings_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(Settings, ["--settings", "/nowhere/s.json"])
    assert "/nowhere/s.json" in capsys.readouterr().err


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = make_key_file(tmp_path / "key")
    assert len(read_secret(path)) >= 43
    assert read_secret(make_key_file(path)) == read_secret(path)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        read_secret(path)


def test_the_scheduler_address_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "address"
    settings = Settings(scheduler_address="127.0.0.1:1", scheduler_address_file=path)
    assert settings.resolve_scheduler_address() == "127.0.0.1:1"
    path.write_text("127.0.0.1:2\n")
    assert settings.resolve_scheduler_address() == "127.0.0.1:2"
    with pytest.raises(ValueError, match="scheduler_address"):
        Settings().resolve_scheduler_address()


@pytest.mark.parametrize("missing", ["service_key_file", "bootstrap_key_file", "scheduler_address"])
def test_job_tokens_cannot_be_required_without_who_knows_them(tmp_path: Path, missing: str) -> None:
    values = {
        "service_key_file": tmp_path / "service.key",
        "bootstrap_key_file": tmp_path / "bootstrap.key",
        "scheduler_address": "127.0.0.1:1",
    }
    ServerSettings(require_job_tokens=True, **values)  # type: ignore[arg-type]
    del values[missing]
    with pytest.raises(ValueError, match=missing):
        ServerSettings(require_job_tokens=True, **values)  # type: ignore[arg-type]
    ServerSettings(**values)  # type: ignore[arg-type]
