"""The rules of the house: who may import whom, where commands stand, how texts begin."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A folder may import those of the lines before its own, and itself.
ORDER = (
    *(("cli", "ops"), ("workers",), ("envs",), ("config",), ("run",), ("networks",), ("experience",)),
    *(("algorithms",), ("reporting",), ("remote",), ("training",), ("commands",)),
)
RANKS = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}
# The modules of resnet that may import tfrl: its trainer and its commands. The others are the zoo.
TRAINER = ("callbacks", "config", "data", "learner", "procgen_frames", "train", "evaluate", "__main__")
PACKAGES = ("tfrl", "resnet", "cluster", "benchmarks")


def modules(root, *packages):
    """The files of packages below `root`, by module name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path, *, for_types=True):
    """What a file imports, anywhere in it: `tfrl.run.files` for `from tfrl.run import files`, say.

    Without `for_types`, the imports within `if TYPE_CHECKING` are left out.
    """
    skipped = set()
    for node in ast.walk(parsed(path)):
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {*node.body}
        elif node in skipped:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has relative imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(path):
    """The project's modules that a file with `importlib.import_module` names in strings.

    These are whole strings, such as "tfrl.run.files", and the beginnings of f-strings, such as
    `tfrl.algorithms.*` of f"tfrl.algorithms.{name}".
    """
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "import_module" in text else ():
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            text = f"{node.values[0].value}*"
        else:
            text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"(tfrl|resnet|cluster)(\.\w+)*\.[\w*]+", text):
            yield text


def defined(path):
    """The names at the top of a module, also those within its conditions; None if it makes them up itself."""
    names, waiting = set(), list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            names |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return None if "__getattr__" in names else names


def missing_imports(root):
    """`MODULE imports NAME` of each name that a project's module does not have."""
    found = modules(root, *PACKAGES)
    names = {module: defined(path) for module, path in found.items()}
    return [
        f"{importer} imports {name}"
        for importer, path in found.items()
        for name in imported(path)
        if name not in found and (module := name.rpartition(".")[0]) in found
        if names[module] is not None and name.rpartition(".")[2] not in names[module]
    ]


def test_every_name_that_is_imported_is_there():
    assert not missing_imports(ROOT)


def test_a_name_that_is_not_there_is_found(tmp_path):
    (tmp_path / "tfrl").mkdir()
    (tmp_path / "tfrl" / "one.py").write_text(
        "try:\n    import gone\nexcept ImportError:\n    gone = kept = 1\n"
    )
    (tmp_path / "tfrl" / "two.py").write_text("def late():\n    from tfrl.one import gone, kept, moved\n")
    assert missing_imports(tmp_path) == ["tfrl.two imports tfrl.one.moved"]


def folder_of(module):
    """The folder of tfrl that a module, or a name in one, is of; `commands` for what stands above all."""
    _, _, inside = module.partition(".")
    first = inside.partition(".")[0]
    return first if first in RANKS else "commands"


def may_import(importer, name):
    """Whether a module may import a name, both dotted."""
    own, package = importer.split(".")[0], name.split(".")[0]
    if package not in ("tfrl", "resnet", "cluster"):
        return True
    if name == "tfrl.__version__" or own == package == "tfrl" and name == "tfrl":
        return True  # what stands in tfrl/__init__.py
    if own == "tfrl":
        mine = folder_of(importer)
        if package == "cluster":
            return importer in ("tfrl.completion", "tfrl.__main__") or mine in ("remote", "training")
        theirs = folder_of(name)
        if package == "resnet" and name.startswith("resnet.config."):
            return RANKS[mine] >= RANKS["algorithms"]
        if package == "resnet":
            return mine == "commands" or not is_of_trainer(name)
        return mine == theirs or RANKS[theirs] < RANKS[mine]
    if own == "cluster":
        return package == "cluster" or name.startswith(("tfrl.cli.", "tfrl.workers."))
    if is_of_trainer(importer):
        return package in ("resnet", "tfrl")
    return package == "resnet" and not is_of_trainer(name)


def is_of_trainer(name):
    """Whether a module of resnet, or a name in one, is of its trainer."""
    return name.startswith("resnet.") and name.split(".")[1] in TRAINER


def wrong_imports(root):
    """`MODULE imports NAME`, of each import that the house does not allow."""
    return [
        f"{module} imports {name}"
        for module, path in modules(root, "tfrl", "resnet", "cluster").items()
        for name in (*imported(path), *named(path))
        if not may_import(module, name)
    ]


def test_imports_run_one_way():
    assert not wrong_imports(ROOT)


def test_every_folder_has_its_place():
    folders = {path.name for path in (ROOT / "tfrl").iterdir() if (path / "__init__.py").exists()}
    assert folders <= RANKS.keys() and RANKS.keys() - folders <= {"commands"}


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("tfrl/cli/flags.py", "import tfrl.run.files", "tfrl.cli.flags imports tfrl.run.files"),
        ("tfrl/cli/flags.py", "from tfrl.ops import losses", "tfrl.cli.flags imports tfrl.ops.losses"),
        ("tfrl/run/folder.py", "from tfrl import networks", "tfrl.run.folder imports tfrl.networks"),
        ("tfrl/run/folder.py", "def f():\n    import tfrl.tune", "tfrl.run.folder imports tfrl.tune"),
        (
            "tfrl/remote/actors.py",
            "import tfrl.training.learner",
            "tfrl.remote.actors imports tfrl.training.le",
        ),
        ("tfrl/report.py", "import cluster.launch", "tfrl.report imports cluster.launch"),
        (
            "tfrl/config/run.py",
            'f = import_module("tfrl.run.files")',
            "tfrl.config.run imports tfrl.run.files",
        ),
        ("tfrl/config/run.py", 'f = import_module(f"tfrl.{name}")', "tfrl.config.run imports tfrl.*"),
        ("tfrl/config/run.py", "from resnet.config import READER", "tfrl.config.run imports resnet.config.R"),
        ("tfrl/algorithms/registry.py", 'f = import_module(f"tfrl.algorithms.{name}")', None),
        ("tfrl/algorithms/registry.py", "from resnet.config import READER", None),
        ("tfrl/algorithms/ppo.py", "import resnet.data", "tfrl.algorithms.ppo imports resnet.data"),
        ("resnet/networks.py", "from tfrl.cli import flags", "resnet.networks imports tfrl.cli.flags"),
        (
            "resnet/networks.py",
            "from resnet import data",
            "resnet.networks imports resnet.data",
        ),
        ("resnet/data.py", "import cluster", "resnet.data imports cluster"),
        ("cluster/launch.py", "from tfrl.run import files", "cluster.launch imports tfrl.run.files"),
        ("cluster/launch.py", "import resnet", "cluster.launch imports resnet"),
        ("tfrl/algorithms/ppo.py", "from cluster import launch", "tfrl.algorithms.ppo imports cluster.l"),
        ("tfrl/training/loop.py", "import tfrl.algorithms.ppo, tfrl.cli.flags, resnet, numpy", None),
        ("tfrl/training/loop.py", "from cluster import launch", None),
        ("tfrl/run/folder.py", "from tfrl import __version__", None),
        ("tfrl/completion.py", "from cluster import launch\nimport resnet.config", None),
        ("resnet/train.py", "from tfrl.cli import endings", None),
        ("cluster/launch.py", "from tfrl.workers import tf_config", None),
    ],
)
def test_a_wrong_import_is_found(tmp_path, module, line, wrong):
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(line)
    found = wrong_imports(tmp_path)
    assert len(found) == (wrong is not None) and all(sentence.startswith(wrong) for sentence in found)


def circle(root):
    """The modules of a circle of imports, also of imports in functions, but not of those for types alone.

    The package tfrl itself may be imported by all, because it has its version before it imports anything.
    """
    found, imports = modules(root, *PACKAGES), {}
    for module, path in found.items():
        names = imported(path, for_types=False)
        inside = {name if name in found else name.rpartition(".")[0] for name in names}
        imports[module] = (inside & found.keys()) - {module, "tfrl"}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    assert not circle(ROOT)


@pytest.mark.parametrize(
    ("line", "closes"),
    [
        ("import tfrl.one", True),
        ("def late():\n    from tfrl.one import name", True),
        ("if TYPE_CHECKING:\n    from tfrl.one import name", False),
        ("from tfrl import __version__", False),
    ],
)
def test_a_circle_is_found(tmp_path, line, closes):
    (tmp_path / "tfrl").mkdir()
    texts = {"__init__": "import tfrl.one", "one": "from tfrl import two", "two": "import tfrl.three"}
    for name, text in (texts | {"three": line}).items():
        (tmp_path / "tfrl" / f"{name}.py").write_text(text)
    assert {*circle(tmp_path)} == ({"tfrl.one", "tfrl.two", "tfrl.three"} if closes else set())


def test_only_commands_and_the_library_are_directly_under_tfrl():
    for path in (ROOT / "tfrl").glob("*.py"):
        if path.name not in ("__init__.py", "library.py", "callbacks.py"):
            text = path.read_text()
            assert text.startswith('"""python -m tfrl') and 'if __name__ == "__main__":' in text, path


# Texts

# Prose in lower case, too; not an equation, or a name and what it means.
_FRAGMENTS = (
    "What|Of|Whether|Who|How|Where|Which|Why|When|As|By|For|From|In|With|Without|Before|After|It|Also|Those"
)
_BEGINS_WRONG = re.compile(rf"({_FRAGMENTS})\b|[a-z-]+ [a-z]+[ ,.:]")


def public_docstrings(path):
    """Those of a file, its public classes and functions, and the texts under public fields."""
    tree = parsed(path)
    yield ast.get_docstring(tree)
    waiting = [tree]
    while waiting:
        body = waiting.pop().body
        for before, node in zip([None, *body[:-1]], body, strict=True):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield ast.get_docstring(node)
                waiting.append(node) if isinstance(node, ast.ClassDef) else None
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text and isinstance(before, ast.Assign | ast.AnnAssign):
                yield str(node.value.value)


def fragments(root):
    """`FILE: TEXT` of each public docstring that begins otherwise than with a verb or a noun."""
    return [
        f"{path.relative_to(root)}: {text}"
        for path in modules(root, *PACKAGES).values()
        for text in public_docstrings(path)
        if text and not text.startswith("python -m") and _BEGINS_WRONG.match(text)
    ]


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not fragments(ROOT)


def test_a_docstring_that_begins_otherwise_is_found(tmp_path):
    (tmp_path / "tfrl").mkdir()
    text = '"""A file."""\n\n\ndef good():\n    """Returns it."""\n\n\nclass Bad:\n    """What it is."""\n'
    text += (
        '\n    field: int = 0\n    """of a field."""\n\n    def _own(self):\n        """How it is done."""\n'
    )
    text += '\n    def ask(self):\n        """Whether it is."""\n'
    (tmp_path / "tfrl" / "file.py").write_text(text)
    found = [sentence.partition(": ")[2] for sentence in fragments(tmp_path)]
    assert sorted(found) == ["What it is.", "Whether it is.", "of a field."]


def test_every_picture_is_shown_by_a_document():
    documents = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts = "".join(document.read_text() for document in documents)
    for picture in sorted((ROOT / "docs" / "images").iterdir()):
        assert f"images/{picture.name})" in texts, picture
