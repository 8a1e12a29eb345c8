"""Keys are made once, and only their owner may read them."""

import stat
import subprocess
import sys
from pathlib import Path

from opentinker_kit.keys import make_keys
from opentinker_kit.settings import read_secret


def test_keys_are_made_once_and_differ(tmp_path: Path) -> None:
    make_keys(tmp_path)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    names = ("bootstrap", "service", "job_tokens", "s3", "nats", "postgres")
    assert set(first) == {*(f"{name}.key" for name in names), "nats.conf"}
    assert len(set(first.values())) == len(first)
    make_keys(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == first


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    make_keys(tmp_path)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    assert read_secret(tmp_path / "nats.key") in (tmp_path / "nats.conf").read_text()


def test_nats_server_accepts_its_configuration(tmp_path: Path) -> None:
    make_keys(tmp_path)
    server = Path(sys.executable).parent / "nats-server"
    done = subprocess.run(
        [server, "-t", "-c", tmp_path / "nats.conf"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
