"""Links between the documents: each file and each heading that a link names is there."""

import re
from pathlib import Path

import pytest

from tfrl.algorithms.registry import ALGORITHMS

ROOT = Path(__file__).parents[1]
_FENCES = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
_HEADING = re.compile(r"^#{1,6} (.+?) *$", re.MULTILINE)
_MENTION = re.compile(
    r"\b((?:docs|cluster|tests|examples|benchmarks)/[\w./-]+\.(?:md|py|yaml|sbatch|ipynb))\b"
)


def documents(root):
    """The markdown files of the project."""
    folders = [root / name for name in ("docs", "cluster", "benchmarks", "tfrl", "resnet", "examples")]
    return sorted([*root.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def anchors(text):
    """The anchors of a document's headings, as GitHub and MkDocs make them."""
    found = set()
    for heading in _HEADING.findall(_FENCES.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def broken_links(path):
    """The relative links of a document that lead nowhere."""
    text = path.read_text(encoding="utf-8")
    broken = []
    for link in _LINK.findall(_FENCES.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        is_there = target.exists() and (target.is_file() or not anchor)
        if not is_there or anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(path):
    assert not broken_links(path)


def test_a_broken_link_is_found(tmp_path):
    path = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One thing\n\n```\n# no heading\n```\n")
    path.write_text("[a](other.md) [b](other.md#one-thing) [c](none.md) [d](other.md#no-heading) [e](#here)")
    assert broken_links(path) == ["none.md", "other.md#no-heading", "#here"]


def test_documents_that_code_and_texts_name_exist():
    sources = [
        path for name in ("tfrl", "resnet", "cluster", "benchmarks") for path in (ROOT / name).rglob("*.py")
    ]
    for path in [*sources, *documents(ROOT)]:
        for name in _MENTION.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_every_document_is_linked_from_another():
    linked = {
        (path.parent / link.partition("#")[0]).resolve()
        for path in documents(ROOT)
        for link in _LINK.findall(path.read_text(encoding="utf-8"))
        if link.partition("#")[0] and not re.match(r"[a-z]+:", link)
    }
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    assert {path.name for path in pages - linked} <= {"index.md"}


def test_every_algorithm_is_a_command_and_in_the_documents():
    commands = {p.stem for p in (ROOT / "tfrl").glob("*.py") if "main = Command(" in p.read_text()}
    assert commands == {"ppo_procgen", *ALGORITHMS}, "ALGORITHMS is in tfrl/algorithms/registry.py"
    for name in commands:
        assert f"tfrl.{name}`" in (ROOT / "docs/algorithms.md").read_text(), name
        assert f"`{name}`" in (ROOT / "docs/library.md").read_text(), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 700
