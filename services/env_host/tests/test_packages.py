"""Environments that projects upload: versions, builds, jailed workers, and what is refused."""

import asyncio
import io
import os
import stat
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
from services.env_host.tests.conftest import Running, Start, stop

from opentinker_env_host.adapters import archives
from opentinker_env_host.adapters.archives import ArchiveLimits
from opentinker_env_host.adapters.package_store import PackageStore
from opentinker_env_host.settings import PackageSettings
from opentinker_kit.errors import ServiceError
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1 import package_pb2
from opentinkerapi.runtime.errors import OpenTinkerError

GAME = """\
import os, socket
from pathlib import Path
import opentinker as ot

class Game(ot.Environment):
    \"\"\"Tells what it can reach.\"\"\"

    splits = ("train",)

    def tasks(self, split):
        return [{"n": 1}, {"n": 2}]

    def reset(self, *, seed, task):
        self.seed = seed
        return ot.Observation(f"SAYS {seed}")

    def step(self, action):
        word = action.text
        if word == "die":
            os._exit(3)
        if word == "pid":
            return ot.StepResult(str(os.getpid()))
        if word == "files":
            seen = [str(path) for path in Path("/").iterdir()]
            return ot.StepResult(" ".join(sorted(seen)))
        if word == "write":
            try:
                Path("/package/x").write_text("x")
            except OSError as error:
                return ot.StepResult(type(error).__name__)
        if word == "variables":
            return ot.StepResult(" ".join(sorted(os.environ)))
        if word == "network":
            try:
                socket.create_connection(("127.0.0.1", %PORT%), timeout=2)
            except OSError as error:
                return ot.StepResult(type(error).__name__)
            return ot.StepResult("connected")
        return ot.StepResult(None, reward=1.0, terminated=True)
"""
FORGETFUL = """\
import time
import opentinker as ot

class Game(ot.Environment):
    def reset(self, *, seed, task):
        return ot.Observation(str(time.time_ns()))

    def step(self, action):
        return ot.StepResult(None, reward=1.0, terminated=True)
"""


def zipped(files: dict[str, str | bytes]) -> bytes:
    """A zip of these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def wheel(name: str, version: str = "1.0", code: str = "", requires: str = "") -> bytes:
    """A wheel of one module."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    record = f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
    return zipped(
        {
            f"{name}.py": code,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": record,
        }
    )


def source(code: str = GAME, port: int = 9) -> bytes:
    """A package of one module."""
    return zipped({"game.py": code.replace("%PORT%", str(port))})


def request(archive: bytes, name: str = "game", **spec: Any) -> package_pb2.UploadPackageRequest:
    """An upload."""
    return package_pb2.UploadPackageRequest(
        request_id=uuid.uuid4().hex,
        environment_id=name,
        spec=package_pb2.PackageSpec(**{"target": "game:Game", **spec}),
        archive=archive,
    )


async def upload(host: Running, asked: package_pb2.UploadPackageRequest) -> package_pb2.EnvironmentVersion:
    return (await host.call(host.stub.UploadPackage(asked))).version


async def built(host: Running, name: str) -> package_pb2.EnvironmentVersion:
    """The version once it is no longer being built."""
    for _ in range(600):
        asked = package_pb2.GetEnvironmentVersionRequest(name=name)
        version = (await host.call(host.stub.GetEnvironmentVersion(asked))).version
        if version.state != package_pb2.PACKAGE_STATE_BUILDING:
            return version
        await asyncio.sleep(0.1)
    raise AssertionError("it is still being built")


async def refused(host: Running, asked: package_pb2.UploadPackageRequest) -> OpenTinkerError:
    with pytest.raises(OpenTinkerError) as caught:
        await upload(host, asked)
    return caught.value


async def said(host: Running, episode: str, seq: int, text: str) -> str:
    answer = await host.step(episode, seq, text)
    return str(answer.pending[0].observation.content.parts[0].text)


async def test_a_package_is_built_played_and_kept(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    host = await start(state_dir=state)
    port = int(host.env_host.server.address.rpartition(":")[2])
    archive = source(port=port)
    made = await upload(host, request(archive))
    assert (made.name, made.size_bytes) == ("environments/game@1", len(archive))
    version = await built(host, "environments/game")
    assert (version.state, version.build_error) == (package_pb2.PACKAGE_STATE_READY, "")
    assert list(version.warnings) == []
    listed = await host.call(host.stub.ListEnvironments(pb.ListEnvironmentsRequest()))
    assert [each.name for each in listed.environments] == ["environments/counter", "environments/game@1"]
    # By its version, and by its name alone.
    (pinned,) = await host.open("game@1")
    (newest,) = await host.open("game", seed=7)
    assert await host.begin(newest) == "SAYS 7"
    await host.begin(pinned)
    files = await said(host, pinned, 1, "files")
    assert "/package" in files
    assert str(tmp_path.parts[1]) not in files.replace("/tmp", "")
    assert "OPENTINKER_API_KEY" not in await said(host, pinned, 2, "variables")
    assert await said(host, pinned, 3, "network") == "ConnectionRefusedError"
    assert await said(host, pinned, 4, "write") in ("OSError", "PermissionError")
    answer = await host.call(
        host.stub.ListTasks(pb.ListTasksRequest(environment="environments/game", split="train"))
    )
    assert answer.total_size == 2
    # A host that is started again has it, and its episodes.
    assert await said(host, newest, 1, "pid")
    await stop(host)
    again = await start(state_dir=state)
    version = await built(again, "environments/game@1")
    assert version.sha256 == made.sha256
    assert (await again.step(newest, 2, "end")).terminated
    log = await again.call(
        again.stub.GetEnvironmentLog(package_pb2.GetEnvironmentLogRequest(name="environments/game"))
    )
    assert "-m venv" in log.build_log
    assert log.worker_logs[0].worker.startswith("game@1-")


@pytest.mark.slow
async def test_what_its_workers_do_hits_nobody_else(start: Start) -> None:
    host = await start()
    await upload(host, request(source()))
    await built(host, "environments/game")
    (episode,) = await host.open("game")
    (other,) = await host.open("counter")
    await host.begin(episode)
    await host.begin(other)
    with pytest.raises(OpenTinkerError, match="died twice"):
        await host.step(episode, 1, "die")
    await host.step(other, 1, "go on")
    (again,) = await host.open("game")
    await host.begin(again)


@pytest.mark.slow
async def test_versions_and_idempotency(start: Start) -> None:
    host = await start()
    asked = request(source())
    first = await upload(host, asked)
    assert (await upload(host, asked)).name == first.name
    # The same content is the same version, whatever its request id.
    assert (await upload(host, request(source()))).name == first.name
    changed = request(source(), exclusive=True)
    changed.request_id = asked.request_id
    error = await refused(host, changed)
    assert error.reason == "REQUEST_ID_REUSED"
    second = await upload(host, request(source(), exclusive=True))
    assert second.name == "environments/game@2"
    await built(host, second.name)
    delete = package_pb2.DeleteEnvironmentVersionRequest(name=second.name)
    (episode,) = await host.open("game@2")
    with pytest.raises(OpenTinkerError, match="1 episodes of game@2 are open"):
        await host.call(host.stub.DeleteEnvironmentVersion(delete))
    await host.close([episode])
    for _ in range(2):
        await host.call(host.stub.DeleteEnvironmentVersion(delete))
    # Its number is not given again.
    third = await upload(host, request(source(FORGETFUL)))
    assert third.name == "environments/game@3"
    listing = package_pb2.ListEnvironmentVersionsRequest(environment="environments/game", page_size=1)
    page = await host.call(host.stub.ListEnvironmentVersions(listing))
    assert [each.name for each in page.versions] == [third.name]
    listing.page_token = page.next_page_token
    page = await host.call(host.stub.ListEnvironmentVersions(listing))
    assert [each.name for each in page.versions] == [first.name]
    with pytest.raises(OpenTinkerError, match="name a version to delete"):
        await host.call(
            host.stub.DeleteEnvironmentVersion(
                package_pb2.DeleteEnvironmentVersionRequest(name="environments/game")
            )
        )
    # It drops its seed, and that is said.
    version = await built(host, third.name)
    assert version.state == package_pb2.PACKAGE_STATE_READY
    assert any("DROPS ITS SEED" in warning for warning in version.warnings)


@pytest.mark.slow
async def test_requirements_come_from_wheels(start: Start, tmp_path: Path) -> None:
    # Where jailed users can read it, whoever we are.
    folder = Path(f"/var/tmp/opentinker-test-{uuid.uuid4().hex}")
    folder.mkdir(mode=0o755)
    try:
        (folder / "dice-1.2-py3-none-any.whl").write_bytes(wheel("dice", "1.2", "SIDES = 20\n"))
        (folder / "dice-1.2-py3-none-any.whl").chmod(0o644)
        host = await start(packages=PackageSettings(wheels=folder))
        code = FORGETFUL.replace("import time", "import dice").replace("time.time_ns()", "dice.SIDES + seed")
        await upload(host, request(source(code), requirements=["dice>=1,<2"]))
        version = await built(host, "environments/game")
        assert version.build_error == ""
        (episode,) = await host.open("game", seed=1)
        assert await host.begin(episode) == "21"
        # A wheel brings its own requirements.
        packed = wheel("game", "2.0", code, requires="dice")
        asked = request(packed, "packed", wheel="game-2.0-py3-none-any.whl")
        await upload(host, asked)
        assert (await built(host, "environments/packed")).build_error == ""
        (episode,) = await host.open("packed", seed=2)
        assert await host.begin(episode) == "22"
        # What cannot be had is named.
        await upload(host, request(source(code), "poor", requirements=["dice", "no-such-thing==3"]))
        version = await built(host, "environments/poor")
        assert version.state == package_pb2.PACKAGE_STATE_FAILED
        assert "poor@1: no-such-thing==3 does not install" in version.build_error
        assert "no network" in version.build_error
        with pytest.raises(OpenTinkerError, match=r"poor@1 cannot be played: .*no-such-thing") as caught:
            await host.open("poor")
        assert caught.value.reason == "MISSING_DEPENDENCY"
        log = await host.call(
            host.stub.GetEnvironmentLog(package_pb2.GetEnvironmentLogRequest(name="environments/poor"))
        )
        assert "no-such-thing" in log.build_log
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("import os\nos._exit(4)\n", "ended at once"),
        ("Game = 3\n", "is no environment"),
        ("import os, sys\nos.write(1, b'\\0' * 64)\nos._exit(0)\n", "game@1"),
    ],
)
async def test_a_class_that_cannot_be_loaded_fails_by_name(code: str, what: str, start: Start) -> None:
    host = await start()
    await upload(host, request(source(code)))
    version = await built(host, "environments/game")
    assert version.state == package_pb2.PACKAGE_STATE_FAILED
    assert version.build_error.startswith("game@1: ")
    assert what in version.build_error
    # The same content again is tried again.
    assert (await upload(host, request(source(code)))).name == version.name
    await built(host, version.name)


@pytest.mark.slow
async def test_projects_and_quotas(start: Start, tmp_path: Path) -> None:
    host = await start(packages=PackageSettings(max_project_versions=1, max_project_bytes=2048))
    registry = host.env_host.registry
    await upload(host, request(source(FORGETFUL)))
    await built(host, "environments/game")
    error = await refused(host, request(source(FORGETFUL + "# 2\n")))
    assert (error.reason, "may have 1" in error.message) == ("QUOTA_EXCEEDED", True)
    big = await refused(host, request(zipped({"game.py": os.urandom(4096)}), "other"))
    assert big.reason == "QUOTA_EXCEEDED"
    # Another project neither finds it nor runs in it.
    assert registry.versions("default")
    assert registry.versions("other") == []
    for name in ("game", "game@1", "default/game@1", "../default/game@1"):
        with pytest.raises(Exception, match=r"no environment|is no name"):
            registry.resolve("other", name)


HUGE = 65 << 20


def linked() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("game.py")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def lying() -> bytes:
    """A member whose size is not what its header says."""
    data = bytearray(zipped({"game.py": b"\0" * (1 << 20)}))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = (10).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("archive", "what"),
    [
        (b"no zip at all", "is no zip"),
        (zipped({"../game.py": "x"}), "leads out"),
        (zipped({"/etc/game.py": "x"}), "leads out"),
        (zipped({"a/../../game.py": "x"}), "leads out"),
        (zipped({"a\\..\\game.py": "x"}), "is no name"),
        (zipped({"C:game.py": "x"}), "is no name"),
        (zipped({"a\nb.py": "x"}), "is no name"),
        (zipped({"/".join("a" * 20): "x"}), "is no name"),
        (zipped({"a" * 300: "x"}), "is no name"),
        (zipped({"a": "x", "a/b": "y"}), "a file and a folder"),
        (zipped({}), "holds no file"),
        (zipped({f"f{n}.py": "" for n in range(4097)}), "4097 files"),
        (zipped({"game.py": b"\0" * HUGE}), "unpacks to"),
        (linked(), "is a link"),
    ],
)
def test_archives_that_are_refused(archive: bytes, what: str) -> None:
    with pytest.raises(ServiceError) as caught:
        archives.check(archive, ArchiveLimits(64 << 20, 4096))
    assert (caught.value.reason, caught.value.violations[0][0]) == ("INVALID_FIELD", "archive")
    assert what in caught.value.message


def test_what_is_unpacked_is_counted(tmp_path: Path) -> None:
    archives.unpack(zipped({"a/b.py": "x" * 10, "c.py": ""}), ArchiveLimits(10, 2), tmp_path)
    assert (tmp_path / "a" / "b.py").read_text() == "x" * 10
    assert stat.S_IMODE((tmp_path / "c.py").stat().st_mode) & 0o022 == 0


@pytest.mark.slow
async def test_an_archive_that_lies_about_its_sizes_fails_its_build(start: Start) -> None:
    host = await start()
    await upload(host, request(lying()))
    version = await built(host, "environments/game")
    assert version.state == package_pb2.PACKAGE_STATE_FAILED
    assert "cannot be unpacked" in version.build_error


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("environment_id", {"name": "Game"}),
    ("environment_id", {"name": "../game"}),
    ("environment_id", {"name": "a" * 100}),
    ("environment_id", {"name": "game@3"}),
    ("environment_id", {"name": "counter"}),
    ("spec.target", {"target": "game"}),
    ("spec.target", {"target": "game:Game; import os"}),
    ("spec.target", {"target": "--path:x"}),
    ("spec.requirements[0]", {"requirements": ["--index-url=http://x"]}),
    ("spec.requirements[1]", {"requirements": ["a", "b @ file:///etc/passwd"]}),
    ("spec.requirements[0]", {"requirements": ["./local"]}),
    ("spec.requirements[0]", {"requirements": ["a\n--pre"]}),
    ("spec.requirements[0]", {"requirements": ["git+https://x/y"]}),
    ("spec.requirements", {"requirements": [f"a{n}" for n in range(101)]}),
    ("spec.requires_python", {"requires_python": ">=4"}),
    ("spec.requires_python", {"requires_python": "newest"}),
    ("spec.wheel", {"wheel": "../x.whl"}),
    ("archive", {"archive": os.urandom(9 << 20)}),
]


async def test_uploads_that_are_refused(start: Start) -> None:
    host = await start()
    for field, fields in REFUSED:
        given = {"archive": source(), **fields}
        error = await refused(host, request(given.pop("archive"), given.pop("name", "game"), **given))
        assert (error.reason, error.field) == ("INVALID_FIELD", field), fields
    error = await refused(host, request(zipped({"../game.py": "x"})))
    assert (error.reason, error.field) == ("INVALID_FIELD", "archive")
    listed = await host.call(host.stub.ListEnvironmentVersions(package_pb2.ListEnvironmentVersionsRequest()))
    assert not listed.versions


async def test_without_bubblewrap_nothing_is_taken(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    host = await start()
    error = await refused(host, request(source()))
    assert error.reason == "MISSING_DEPENDENCY"
    assert "apt-get install bubblewrap" in error.message


async def test_uploads_can_be_turned_off(start: Start) -> None:
    host = await start(packages=PackageSettings(enabled=False))
    assert "packages.enabled" in (await refused(host, request(source()))).message


@pytest.mark.slow
async def test_workers_of_versions_that_nobody_plays_end(start: Start) -> None:
    host = await start(packages=PackageSettings(idle_s=0.05))
    await upload(host, request(source()))
    await built(host, "environments/game")
    registry, key = host.env_host.registry, "default/game@1"
    assert host.workers(key)

    async def rested() -> bool:
        registry.rest()
        return not host.workers(key)

    await wait_until(rested, 10.0, what="the worker has ended")
    (episode,) = await host.open("game")
    await host.begin(episode)
    registry.rest()
    assert host.workers(key)


def test_a_half_written_version_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "p-default" / "game"
    (folder / ".new-x").mkdir(parents=True)
    (folder / ".new-x" / "archive.zip").write_bytes(b"x")
    (folder / "1").mkdir()
    (folder / "1" / "record.json").write_text("{")
    assert PackageStore(tmp_path).load() == []
