"""Builds what an uploaded package runs in, and says how its workers are started.

Everything that reads a package's own files runs in a jail: pip, the virtual environment's interpreter, the
workers. Only wheels are installed, so that no code of a package or of its requirements runs while there may
be a network. A virtual environment is named by what is in it and its project, and kept for the next version.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from opentinker_env_host.adapters import archives, jails
from opentinker_env_host.adapters.archives import ArchiveLimits
from opentinker_env_host.adapters.jails import PYTHON, JailedProgram, Shared
from opentinker_env_host.adapters.package_store import project_folder
from opentinker_env_host.adapters.worker_process import ProcessLauncher, WorkerProgram, worker_environment
from opentinker_env_host.domain.packages import Package
from opentinker_env_host.ports import BuildFailed, Sandbox
from opentinker_env_host.settings import EnvHostSettings

log = structlog.get_logger()

_VENV, _PACKAGE, _OPENTINKER, _PIP, _SPEC, _WHEELS = (
    "/venv",
    "/package",
    "/opentinker",
    "/pip",
    "/spec",
    "/wheels",
)
_READY = "ready"
_TAIL = 600
_FAULTS = (
    re.compile(r"No matching distribution found for ([^\s;(]+)"),
    re.compile(r"Could not find a version that satisfies the requirement ([^\s;(]+)"),
    re.compile(r"Cannot install (.+?) because"),
)


class PackageBuilder:
    """See the module's text."""

    def __init__(self, settings: EnvHostSettings, sandbox: Sandbox) -> None:
        self._settings = settings
        self._given = settings.packages
        self._sandbox = sandbox
        self._limits = ArchiveLimits(settings.packages.unpacked_bytes, settings.packages.files)
        self._shared: Shared | None = None
        self._sharing = asyncio.Lock()
        self._root: Path | None = None

    async def python(self) -> str:
        """The version of Python that packages run on. MISSING_DEPENDENCY where there can be no jail."""
        return (await self._ready()).python

    async def check(self, archive: bytes) -> None:
        """ServiceError INVALID_FIELD for an archive that is not taken."""
        await asyncio.to_thread(archives.check, archive, self._limits)

    async def build(self, package: Package, archive: bytes) -> None:
        """Make what its workers need. BuildFailed, ServiceError."""
        shared = await self._ready()
        self.log_path(package).parent.mkdir(parents=True, exist_ok=True)
        self.log_path(package).write_bytes(b"")
        source = self._source(package)
        if not (source / _READY).exists():
            await asyncio.to_thread(self._unpack, package, archive, source)
        venv = self._venv(package, shared)
        if not (venv / _READY).exists():
            await self._make_venv(package, shared, source, venv)

    def program(self, package: Package) -> WorkerProgram:
        """How its workers are started, once it is built."""
        shared = self._shared
        assert shared is not None, "it is built"
        files = self._source(package) / "files"
        inside = [Path(_PACKAGE)]
        if (files / "src").is_dir():
            inside.insert(0, Path(_PACKAGE) / "src")
        folders = [
            (self._venv(package, shared) / "venv", _VENV, False),
            (shared.opentinker, _OPENTINKER, False),
        ]
        if not package.spec.wheel:
            folders.append((files, _PACKAGE, False))
        limits = {
            "memory_bytes": self._given.memory_bytes,
            "processes": self._given.processes,
            "folder_bytes": self._given.worker_file_bytes,
        }
        variables = self._variables() | {"PYTHONPATH": _OPENTINKER, "OPENTINKER_JAILED": "1"}
        return WorkerProgram(
            environment=package.version,
            target=package.spec.target,
            path=() if package.spec.wheel else tuple(inside),
            python=Path(_VENV) / "bin" / "python",
            log_dir=self._log_dir(package),
            start_timeout_s=self._settings.start_timeout_s,
            jail=JailedProgram(self._settings.default_python, tuple(folders), limits, variables),
        )

    def launcher(self, package: Package) -> ProcessLauncher:
        """Starts its workers, once it is built."""
        return ProcessLauncher(self.program(package))

    def is_built(self, package: Package) -> bool:
        """Whether what its workers need is there, once `prepare` was called."""
        if self._shared is None:
            return False
        return all(
            (folder / _READY).exists()
            for folder in (self._source(package), self._venv(package, self._shared))
        )

    def log_path(self, package: Package) -> Path:
        """What its build wrote."""
        folder = self._settings.state_dir / "logs" / "builds" / project_folder(package.project)
        return folder / f"{package.version}.log"

    def logs(self, package: Package, tail_bytes: int) -> tuple[str, list[tuple[str, str]]]:
        """The end of what its build wrote, and of what each worker did, the newest first."""
        found = sorted(
            self._log_dir(package).glob(f"{package.version}-*.log"),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        workers = [(path.stem, _tail(path, tail_bytes)) for path in found[:8]]
        return _tail(self.log_path(package), tail_bytes), workers

    def remove(self, package: Package, others: Sequence[Package]) -> None:
        """Delete what none of the other packages needs."""
        if self._root is None or self._shared is None:
            return
        shared = self._shared
        kept = {folder for other in others for folder in (self._source(other), self._venv(other, shared))}
        for folder in {self._source(package), self._venv(package, shared)} - kept:
            shutil.rmtree(folder, ignore_errors=True)

    async def _ready(self) -> Shared:
        async with self._sharing:
            if self._shared is None:
                facts = await self._sandbox.facts()
                if not facts.mode:
                    raise jails.missing(facts.error)
                self._root = jails.open_folder(self._given.build_dir, self._settings.state_dir)
                self._shared = await jails.share(
                    self._settings.default_python, self._root, worker_environment()
                )
            return self._shared

    def _unpack(self, package: Package, archive: bytes, source: Path) -> None:
        with self._made(source) as made:
            files = made / "files"
            files.mkdir(mode=0o755)
            if package.spec.wheel:
                archives.check(archive, self._limits)
                (files / package.spec.wheel).write_bytes(archive)
            else:
                archives.unpack(archive, self._limits, files)
            _open_up(made)

    async def _make_venv(self, package: Package, shared: Shared, source: Path, venv: Path) -> None:
        with self._made(venv) as made:
            inside = made / "venv"
            (inside / "tmp").mkdir(parents=True, mode=0o755)
            spec = made / "spec"
            spec.mkdir(mode=0o755)
            wanted = list(package.spec.requirements)
            (spec / "requirements.txt").write_text("".join(f"{line}\n" for line in wanted))
            folders = [(inside, _VENV, True), (spec, _SPEC, False)]
            _open_up(made)
            await self._jailed(package, folders, [PYTHON, "-m", "venv", "--without-pip", _VENV])
            if not wanted and not package.spec.wheel:
                return
            if shared.pip is None:
                raise jails.missing("there is no pip beside this host's interpreter")
            (inside / "tmp").mkdir(exist_ok=True, mode=0o755)
            folders.append((shared.pip, _PIP, False))
            words = [
                f"{_VENV}/bin/python",
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "--no-input",
            ]
            words += ["--no-cache-dir", "--only-binary", ":all:", "--no-warn-script-location"]
            if not self._given.network:
                words.append("--no-index")
            if self._given.wheels is not None:
                folders.append((self._given.wheels.resolve(), _WHEELS, False))
                words += ["--find-links", _WHEELS]
            words += ["-r", f"{_SPEC}/requirements.txt"]
            if package.spec.wheel:
                folders.append((source / "files", _PACKAGE, False))
                words.append(f"{_PACKAGE}/{package.spec.wheel}")
            await self._jailed(package, folders, words, network=self._given.network)

    async def _jailed(
        self,
        package: Package,
        folders: list[tuple[Path, str, bool]],
        words: list[str],
        *,
        network: bool = False,
    ) -> None:
        """Run one program of a build. BuildFailed with the end of its log."""
        limits = {
            "memory_bytes": self._given.memory_bytes,
            "processes": self._given.processes,
            "folder_bytes": self._given.venv_bytes,
        }
        variables = self._variables() | {"TMPDIR": f"{_VENV}/tmp", "PYTHONPATH": _PIP}
        if network and self._given.index_url:
            variables["PIP_INDEX_URL"] = self._given.index_url
        program = JailedProgram(self._settings.default_python, tuple(folders), limits, variables, network)
        path = self.log_path(package)
        with path.open("ab") as file:
            file.write(f"$ {' '.join(words)}\n".encode())
            file.flush()
            process = await asyncio.create_subprocess_exec(
                *program.wrap(words),
                stdin=DEVNULL,
                stdout=file,
                stderr=file,
                env=worker_environment(),
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._given.build_timeout_s):
                status = await process.wait()
        except TimeoutError:
            raise BuildFailed(f"it was not built within {self._given.build_timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status != 0:
            raise _failed(_tail(path, 1 << 16), network)

    @contextlib.contextmanager
    def _made(self, folder: Path) -> Iterator[Path]:
        """A folder beside this one, which takes its place once it is complete."""
        assert self._root is not None
        made = Path(tempfile.mkdtemp(prefix="new-", dir=self._root))
        os.chmod(made, 0o755)
        try:
            yield made
            (made / _READY).touch()
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _source(self, package: Package) -> Path:
        return self._folder("source", [package.project, package.sha256, package.spec.wheel])

    def _venv(self, package: Package, shared: Shared) -> Path:
        wheel = [package.spec.wheel, package.sha256] if package.spec.wheel else []
        parts = [package.project, shared.python, *sorted(package.spec.requirements), *wheel]
        return self._folder("venv", parts)

    def _folder(self, kind: str, parts: list[str]) -> Path:
        assert self._root is not None, "it is built"
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        return self._root / f"{kind}-{digest}"

    def _log_dir(self, package: Package) -> Path:
        return self._settings.state_dir / "logs" / "workers" / project_folder(package.project)

    def _variables(self) -> dict[str, str]:
        return {
            "HOME": "/work",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{_VENV}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": "/work",
        }


def _open_up(folder: Path) -> None:
    """Let jailed users read it."""
    for where, _, names in os.walk(folder):
        os.chmod(where, 0o755)
        for name in names:
            os.chmod(os.path.join(where, name), 0o644, follow_symlinks=False)


def _failed(said: str, network: bool) -> BuildFailed:
    for fault in _FAULTS:
        if found := fault.search(said):
            where = "" if network else "; there is no network while packages are built on this host"
            return BuildFailed(f"{found[1]} does not install: {found[0]}{where}", found[1])
    return BuildFailed(f"its virtual environment was not built: {said.strip()[-_TAIL:]}")


def _tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""
