"""The texts that stand under the fields of a dataclass of settings, for what is written with its values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from itertools import pairwise


def field_help(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, or of the class that it comes from, in one line, by name."""
    found: dict[str, str] = {}
    for of_class in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(of_class)))
        except OSError:  # there is no source: an archive of compiled files, say
            continue
        for field, text in pairwise(tree.body[0].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found
