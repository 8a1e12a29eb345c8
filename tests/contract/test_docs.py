"""What the documentation names must exist."""

import inspect
import re
from pathlib import Path

import pytest

import opentinker

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FIELD_BUGS = ROOT / "docs" / "field_bugs.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [link for link in links if "://" not in link]
    broken = [link for link in local if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_exist(page: Path) -> None:
    for name, called in re.findall(r"`ot\.([A-Za-z_.]+)(?:\(([a-z_, ]*)\))?[^`\n]*`", page.read_text()):
        thing: object = opentinker
        for part in name.rstrip(".").split("."):
            thing = getattr(thing, part)
        options = [each for each in called.split(", ") if each]
        assert set(options) <= set(inspect.signature(thing).parameters if options else ()), name


def test_tests_against_field_bugs_exist() -> None:
    rows = re.findall(r"^\| (B\d+) \|[^|]*\|([^|]*)\|$", FIELD_BUGS.read_text(), re.MULTILINE)
    for bug, where in rows:
        tests = re.findall(r"`([^`]+)`", where)
        assert tests, f"{bug}: no test is named"
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"{bug}: no file {path}"
            assert f"def {name.split('::')[-1]}(" in (ROOT / path).read_text(), f"{bug}: no {name} in {path}"
