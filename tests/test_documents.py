"""Links between the documents: each file and each heading that a link names is there."""

import functools
import itertools
import re
import shlex
from pathlib import Path

import pytest

from tfrl import completion
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


def test_every_picture_is_shown():
    shown = {
        (path.parent / link).resolve()
        for path in documents(ROOT)
        for link in _LINK.findall(path.read_text(encoding="utf-8"))
    }
    assert not {*(ROOT / "docs" / "images").resolve().iterdir()} - shown


def test_every_algorithm_is_a_command_and_in_the_documents():
    commands = {p.stem for p in (ROOT / "tfrl").glob("*.py") if "main = Command(" in p.read_text()}
    assert commands == {"ppo_procgen", *ALGORITHMS}, "ALGORITHMS is in tfrl/algorithms/registry.py"
    for name in commands:
        assert f"tfrl.{name}`" in (ROOT / "docs/algorithms.md").read_text(), name
        assert f"`{name}`" in (ROOT / "docs/library.md").read_text(), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 700


# Commands and settings that the pages show

_COMMAND = re.compile(r"(?:python -m (?=tfrl|resnet|cluster)|(?:^|`)(?=tfrl )|-- (?=ppo|drac))([^`#|]+)")


@functools.cache
def known_flags():
    return completion._flags()


def commands(text):
    """The words of each command that a page shows, beginning with its module's name."""
    for line in text.replace("\\\n", " ").splitlines():
        for found in _COMMAND.findall(line.replace("…", "").replace("\\|", "/")):
            try:
                words = shlex.split(found.strip().rstrip("'\""))
            except ValueError:  # the quotation goes on elsewhere
                words = found.split()
            for place, part in enumerate(split_at(words, "--")):
                name = f"tfrl.{part[0]}" if place or part[0] not in known_flags() else part[0]
                if part[0] == "tfrl" and len(part) > 1:
                    name, part = f"tfrl.{part[1]}", part[1:]
                yield name, part


def split_at(words, separator):
    """Lists of the words between the separators, without empty ones."""
    groups = itertools.groupby(words, lambda word: word == separator)
    return [list(group) for is_separator, group in groups if not is_separator]


def unknown_flags(text):
    """`COMMAND --flag` for each flag that a shown command does not have."""
    wrong = []
    for name, words in commands(text):
        known = known_flags().get(name)
        if known is None:
            continue
        flags = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
        wrong += [f"{name} {flag}" for flag in flags if flag not in known and flag not in _NO_FLAGS]
    return wrong


_NO_FLAGS = {"--help", "--help-all", "--total_timesteps"}
"""Flags of every command, and the example of a name that another system has."""


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_of_a_shown_command_exists(path):
    assert not unknown_flags(path.read_text(encoding="utf-8"))


def test_an_unknown_flag_of_a_shown_command_is_found():
    text = "```\npython -m tfrl.ppo --env x \\\n  --clipping 1\n```\n`tfrl dqn --taus 2`, "
    text += "`python -m tfrl.tune -- ppo --lrs 1`"
    assert unknown_flags(text) == ["tfrl.ppo --clipping", "tfrl.dqn --taus", "tfrl.ppo --lrs"]


def test_the_names_for_newcomers_from_other_systems_exist():
    """Each --flag of docs/coming-from.md, in the command of its table, and each keyword of `tfrl.train`."""
    page, command = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8"), "tfrl.ppo"
    for line in page.splitlines():
        if head := re.search(r"`(tfrl\.\w+)` \|", line):
            command = head[1] if head[1] in known_flags() else command
        for flag in re.findall(r"(?<!-)(?<!\w)(--[a-z][a-z-]+)(?!\w)", line.replace("--total_timesteps", "")):
            assert flag in known_flags()[command], (command, flag)
        here = line.split(" | ")[1] if line.count(" | ") else ""
        for name in re.findall(r"`(\w+)=", here):
            every = {flag for flags in known_flags().values() for flag in flags} | {"--network"}
            assert f"--{name.replace('_', '-')}" in every, name


def test_every_column_of_the_kept_runs_is_explained():
    page = (ROOT / "docs" / "reading-results.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "benchmarks" / "runs").glob("*/progress.csv"))
    columns = {name for path in files for name in path.read_text().partition("\n")[0].split(",")}
    explained = set(re.findall(r"`([a-z_…]+/[a-z_…A-Z]+)`", page))
    groups = tuple(name.rstrip("…") for name in explained if name.endswith("…"))  # `time/…`, `train/aux_…`
    endings = tuple(name.rpartition("…")[2] for name in explained if "…/" in name)  # `…/episode_length`
    assert len(columns) > 30
    missing = columns - explained - {"env_steps"}
    assert not {name for name in missing if not name.startswith(groups) and not name.endswith(endings)}


def test_the_readmes_numbers_stand_in_the_results():
    """The cells of its tables with numbers; `python -m benchmarks.tables` computes the others."""
    readme = re.sub(r"<!-- tables.*?<!-- end -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    cells = [cell.strip() for line in re.findall(r"^\| (.+) \|$", readme, re.M) for cell in line.split(" | ")]
    numbers = [cell for cell in cells if re.fullmatch(r"[-−\d.,% …to]*\d[-−\d.,% …to]*", cell)]
    assert numbers
    assert not [cell for cell in numbers if cell not in results]
