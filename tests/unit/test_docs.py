"""The pages: links lead somewhere, what is made from the program is up to date, the README stays short."""

import importlib.util
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tools.release import check_addresses

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The page without code, in which brackets are no links."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """What headings can be linked to by, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: str) -> Iterator[tuple[Path, str]]:
    """Every relative link of a page: the file, and the anchor or nothing."""
    path = ROOT / page
    for match in LINK.finditer(prose(path.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if "://" not in match["target"] and not target.startswith("mailto:"):
            yield (path.parent / target if target else path), anchor


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    dead = [
        f"{path}#{anchor}"
        for path, anchor in links(page)
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]
    assert not dead


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    assert not [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]


def test_every_page_can_be_reached_from_the_readme() -> None:
    named = {path.resolve() for path, _ in links("README.md")}
    assert {ROOT / page for page in PAGES} - named == {ROOT / "README.md"}


def test_the_readme_is_short_and_fits_a_terminal() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 115
    assert len(text.split()) <= 950
    wide = [line for block in FENCE.findall(text) for line in block.splitlines() if len(line) > 80]
    assert not wide


def test_the_readme_has_the_oldest_versions_and_the_license_of_the_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch>="))
    oldest = project["requires-python"].removeprefix(">="), torch.removeprefix("torch>=")
    assert "Linux, Python {} or newer, torch {} or newer.".format(*oldest) in text
    assert f"[license](LICENSE) ({project['license']})" in text
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith(f"{project['license']} License\n")


@pytest.mark.parametrize("url", ["", "https://forge.example/me/gpurun"])
def test_the_package_names_the_repository_where_its_address_is_known(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    monkeypatch.setenv("REPOSITORY_URL", url)
    runpy.run_path(str(ROOT / "setup.py"))
    metadata = Message()
    metadata.set_payload(given["long_description"])
    for project in given["project_urls"].items():
        metadata["Project-URL"] = ", ".join(project)
    check_addresses(metadata, url)
    with pytest.raises(SystemExit, match="release-check: "):
        check_addresses(metadata, "https://forge.example/other" if not url else "")
    if url:
        metadata.set_payload("[a page](docs/page.md)")
        with pytest.raises(SystemExit, match=r"dead links: \['docs/page.md'\]"):
            check_addresses(metadata, url)


def make_pages() -> ModuleType:
    """`docs/make_pages.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_made_from_the_program_are_up_to_date() -> None:
    stale = [str(path) for path, text in make_pages().pages() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `make docs`"


def test_no_page_names_a_path_of_the_machine_that_it_was_written_on() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"/(root|work|tmp/wt)\b", text), page


def test_every_attack_has_a_test() -> None:
    """`docs/security.md` names the table."""
    table = "tests/attacks.md"
    assert f"`{table}`" in (ROOT / "docs/security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / table).read_text(encoding="utf-8"))
    assert named
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in named}
    assert not [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in sources[path]]
