"""docs/features.md: the flags, commands, files and tests of each row exist, so no feature is lost."""

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest

import tfrl
from tfrl import completion
from tfrl.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
_SPAN = re.compile(r"`([^`]+)`")
_COLUMN = re.compile(r"[a-z_]+/[a-z_]+")  # of progress.csv


def rows(text, width=4):
    """The cells of each row of the page's tables of this width, without their heads."""
    found = [line[2:-2].split(" | ") for line in text.splitlines() if re.fullmatch(r"\| .+ \|", line)]
    return [cells for cells in found if len(cells) == width and cells[0] not in ("feature", "from")]


def faults(text):
    """`FEATURE: what is missing` for each name of a page that is not there."""
    found = []
    for feature, _, use, tests in rows(text):
        nodes = _SPAN.findall(tests)
        wrong = [fault_of_use(span) for span in _SPAN.findall(use)]
        wrong += [fault_of_test(node, nodes) for node in nodes] or ["it has no test"]
        found += [f"{feature}: {fault}" for fault in wrong if fault]
    return found


# How a feature is used


@functools.cache
def flags():
    """The flags of each command, each with its choices, and of all commands together, as ""."""
    known = completion._flags()
    every = {}
    for name, choices in itertools.chain.from_iterable(of.items() for of in known.values()):
        every[name] = [*every.get(name, ()), *choices]
    return known | {"": every | {"--help-all": []}}


@functools.cache
def sources():
    """All code."""
    return "".join(path.read_text() for name in ("tfrl", "resnet") for path in (ROOT / name).rglob("*.py"))


def fault_of_use(span):
    """What is wrong with a command, flag, file, column or name of the library; None: nothing."""
    words = re.sub(r"^python -m |^touch ", "", span).split()
    if words[0] == "tfrl" and len(words) > 1:
        words = [f"tfrl.{words[1]}", *words[2:]]
    first = words[0]
    if first in COMMANDS or first.startswith("--"):
        return fault_of_flags(flags()[first if first in COMMANDS else ""], words)
    if re.fullmatch(r"(tfrl|policy)\.[\w.]+", first):
        of = {"tfrl": tfrl, "policy": tfrl.Policy}
        start, *names = first.split(".")
        return None if has(of[start], names) else f"there is no {first}"
    if (ROOT / first.partition("/")[0]).is_dir():
        return None if (ROOT / first).exists() else f"there is no {first}"
    if first.startswith("RUN/") or _COLUMN.fullmatch(first):
        parts = [p for p in first.split("/")[1:] if p == p.lower()]
        missing = [p for p in parts if not re.search(rf"""["/]{re.escape(p)}["/]""", sources())]
        return f"no code writes {first}" if missing else None
    return f"{span} is no command, flag, file, column, or name of the library"


def fault_of_flags(known, words):
    """What is wrong with the flags of a command and their values."""
    for word, value in itertools.pairwise([*words, "--"]):
        if word.startswith("--") and word not in known:
            return f"there is no flag {word}" + (f" of {words[0]}" if words[0] != word else "")
        choices = known.get(word)
        if choices and not value.startswith("--") and value not in choices:
            return f"{word} cannot be {value}"
    return None


def has(thing, names):
    """Whether a name of a name of a thing, and so on, is there."""
    for name in names:
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


# Its tests


@functools.cache
def definitions(path):
    """The functions and the values at the top of a test file, by name."""
    found = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def fault_of_test(node, nodes):
    """What is wrong with a test FILE::NAME, or with an example, of a feature with these tests."""
    path, _, name = node.partition("::")
    if not (ROOT / path).is_file():
        return f"there is no {path}"
    if path.startswith("examples/"):
        return None if is_run(path, nodes) else f"no test runs {path}"
    is_test = re.search(r"/test_\w+\.py::test_\w+$", node)
    if not (is_test and isinstance(definitions(path).get(name), ast.FunctionDef)):
        return f"there is no test {node}"
    return f"{node} is skipped" if is_skipped(definitions(path), name) else None


def is_run(example, nodes):
    """Whether tests/library/test_examples.py runs an example, or one of the tests of its feature names it."""
    shown = ast.literal_eval(definitions("tests/library/test_examples.py")["SHOWN"])
    tests = [node.split("::") for node in nodes if "::" in node]
    named = [ast.unparse(definitions(path)[name]) for path, name in tests if name in definitions(path)]
    return Path(example).stem in shown or any(Path(example).name in text for text in named)


def is_skipped(found, name):
    """Whether a test, or its whole file, is always skipped or may fail; not if a condition decides."""
    marks = [*found[name].decorator_list, *filter(None, [found.get("pytestmark")])]
    for mark in [found.get(m.id, m) if isinstance(m, ast.Name) else m for m in marks]:
        for part in ast.walk(mark):
            if isinstance(part, ast.Attribute) and part.attr in ("skip", "xfail"):
                return True
            always = isinstance(part, ast.Call) and part.args and isinstance(part.args[0], ast.Constant)
            if always and isinstance(part.func, ast.Attribute) and part.func.attr == "skipif":
                return True
    return False


def test_every_feature_is_there_with_its_tests():
    assert not faults(PAGE)


def test_no_feature_is_lost():
    """Whoever removes one on purpose changes the number, too."""
    assert len(rows(PAGE)) >= 134
    names = [feature for feature, *_ in rows(PAGE)]
    assert len({*names}) == len(names)
    known = {name for name, _ in rows(PAGE, 2)}
    assert {source for _, of, *_ in rows(PAGE) for source in of.split(", ")} == known


@pytest.mark.parametrize(
    ("use", "tests", "fault"),
    [
        ("`tfrl.dqn --tau`", "`examples/own_env.py`", None),
        ("`tfrl dqn --taus`", "`examples/own_env.py`", "there is no flag --taus of tfrl.dqn"),
        ("`python -m tfrl.dqn --clip-ratio`", "`examples/own_env.py`", "no flag --clip-ratio of tfrl.dqn"),
        ("`--resume begin`", "`examples/own_env.py`", "--resume cannot be begin"),
        ("`--frobnicate`", "`examples/own_env.py`", "there is no flag --frobnicate"),
        ("`tfrl.a3c`", "`examples/own_env.py`", "there is no tfrl.a3c"),
        ("`tfrl.callbacks.Lost`", "`examples/own_env.py`", "there is no tfrl.callbacks.Lost"),
        ("`RUN/lost.csv`", "`examples/own_env.py`", "no code writes RUN/lost.csv"),
        ("`train/lost_metric`", "`examples/own_env.py`", "no code writes train/lost_metric"),
        ("`cluster/lost.json`", "`examples/own_env.py`", "there is no cluster/lost.json"),
        ("`something`", "`examples/own_env.py`", "something is no command, flag, file, column, or name"),
        ("always", "`examples/lost.py`", "there is no examples/lost.py"),
        ("always", "`examples/ray_blocks.py`", "no test runs examples/ray_blocks.py"),
        ("always", "`tests/test_lost.py::test_x`", "there is no tests/test_lost.py"),
        ("always", "`tests/test_features.py::test_lost`", "there is no test tests/test_features.py::test_lo"),
        ("always", "`tests/test_features.py::rows`", "there is no test tests/test_features.py::rows"),
        ("always", "none", "it has no test"),
    ],
)
def test_a_missing_feature_is_found(use, tests, fault):
    found = faults(f"| feature | from | use | tests |\n|---|---|---|---|\n| it | here | {use} | {tests} |\n")
    assert found == [] if fault is None else len(found) == 1 and fault in found[0]


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("def test_it(): ...", False),
        ("@pytest.mark.long\ndef test_it(): ...", False),
        ("@pytest.mark.skipif(WINDOWS, reason='x')\ndef test_it(): ...", False),
        ("@pytest.mark.skipif(True, reason='x')\ndef test_it(): ...", True),
        ("@pytest.mark.skip\ndef test_it(): ...", True),
        ("@pytest.mark.xfail(strict=False)\ndef test_it(): ...", True),
        ("broken = pytest.mark.skip('x')\n@broken\ndef test_it(): ...", True),
        ("pytestmark = [pytest.mark.promise, pytest.mark.skip]\ndef test_it(): ...", True),
    ],
)
def test_a_skipped_test_is_found(tmp_path, text, skipped):
    (tmp_path / "test_it.py").write_text(text)
    assert is_skipped(definitions(tmp_path / "test_it.py"), "test_it") == skipped
