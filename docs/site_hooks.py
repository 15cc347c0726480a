"""Hooks of MkDocs: pages of files outside docs/, and links to them. `make docs` runs them."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _pages() -> dict[str, str]:
    """The pages made of files outside docs/: the name of each page by the file's path in the repository."""
    names = (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "cluster/README.md",
        "benchmarks/runs/README.md",
    )
    pages = {name: name for name in (*names, "tfrl/envs/data/README.md")} | {"README.md": "index.md"}
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            pages[f"examples/{path.name}"] = f"examples/{path.name.replace('.', '_')}.md"
    return pages


def _content(name: str) -> str:
    """The markdown of a file: Python as a code block, a notebook as its cells."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        return f"# {Path(name).name}\n\n```python\n{text}```\n"
    if name.endswith(".ipynb"):
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
        return "\n\n".join(code if kind == "markdown" else f"```python\n{code}\n```" for code, kind in cells)
    return text


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the lists of examples and of the notebook in the navigation."""
    examples = [{Path(name).name: page} for name, page in _pages().items() if name.startswith("examples/")]
    notebook = [f"notebook/{path.name}" for path in sorted((ROOT / "docs/notebook").glob("*.md"))]
    for entry in config.nav:
        for part in entry.get("Python", []):
            if "Examples" in part:
                part["Examples"] = examples
        if "Notebook" in entry:
            entry["Notebook"] = notebook
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files outside docs/."""
    for name, page in _pages().items():
        files.append(File.generated(config, page, content=_content(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links between files of the repository to their pages."""
    pages = _pages()
    own = {made: name for name, made in pages.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def to_page(found: re.Match[str]) -> str:
        link, _, anchor = found[1].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(own), link))
        if target in ("examples", "benchmarks/runs"):  # a folder stands for its first page
            inside = [name for name in pages if name.startswith(f"{target}/")]
            target = inside[0]
        made = pages.get(target, target.removeprefix("docs/"))
        way = posixpath.relpath(made, posixpath.dirname(page.file.src_uri) or ".")
        return f"]({way}{'#' + anchor if anchor else ''})"

    return _LINK.sub(to_page, markdown)
