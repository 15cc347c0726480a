"""Functions by name, `module:function`, as settings, checkpoints and messages contain them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.errors import place, summary
from tfrl.cli.streams import quiet_start

_IMPORTABLE = re.compile(r"[\w.]+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LOCAL = re.compile(r"[\w.]+:.*[<(].*")  # module:function.<locals>.<lambda>, module:Class()
_NEEDS_TENSORFLOW = re.compile(r"^\s*(import|from) (tensorflow|keras)\b", re.MULTILINE)
_given: dict[str, Callable[..., Any]] = {}  # the callables that this process was given, by name


def give(make: Callable[..., Any]) -> str:
    """Lets this process find a callable by its name, and returns this name.

    If a lambda or another local callable has the name of another one, (2) or a larger number follows its
    name.
    """
    plain = name = _name_of(make)
    for number in itertools.count(2):
        if is_importable(name) or name not in _given or _alike(_given[name], make):
            break
        name = f"{plain}({number})"
    _given[name] = make
    return name


def _alike(one: Any, other: Any) -> bool:
    """True if nothing shows that two callables, or what they contain, differ: then they mean the same.

    A notebook's cell that is run again makes its functions and classes anew.
    """
    if one is other:
        return True
    if type(one).__qualname__ != type(other).__qualname__:
        return False
    try:
        if isinstance(one, functools.partial):
            return _alike([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
        if isinstance(one, types.MethodType):
            return _alike([one.__func__, one.__self__], [other.__func__, other.__self__])
        if isinstance(one, types.FunctionType):
            return one.__code__ == other.__code__ and _alike(_content(one), _content(other))
        if isinstance(one, type):
            return one.__qualname__ == other.__qualname__
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(_alike, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        if type(one).__eq__ is object.__eq__:
            return _alike(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
        return bool(one == other)
    except Exception:  # a user's object may raise anything, or contain itself
        return True


def _content(function: types.FunctionType) -> list[Any]:
    """The default arguments of a function, and what it takes from the functions around it."""
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__defaults__, function.__kwdefaults__, around]


def is_name(name: str) -> bool:
    """True if this is the name of a callable and not an env id, even if this process cannot find the
    callable.
    """
    return name in _given or bool(_IMPORTABLE.fullmatch(name) or _LOCAL.fullmatch(name))


def is_importable(name: str) -> bool:
    """True if another process finds the callable by its name alone; not a lambda or a local function."""
    return bool(_IMPORTABLE.fullmatch(name)) and not name.startswith("__main__:")


def find(name: str) -> Callable[..., Any]:
    """The callable of a name, from this process or imported. Raises ValueError if it does not exist."""
    if name in _given:
        return _given[name]
    if not is_importable(name):
        raise ValueError(
            f"only the program that defines {name} can find it: it is a lambda, a local function, an object "
            "or one of a notebook; a name in a module, MODULE:NAME, would be found"
        )
    module, _, attribute = name.partition(":")
    try:
        import_tensorflow_for(module)
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        is_absent = isinstance(error, ModuleNotFoundError) and error.name in (module, module.split(".")[0])
        more = place(error.__traceback__, home_of(module))
        if is_absent:
            start = "start the command in the module's folder, or add that folder to PYTHONPATH"
            more = f"; {as_module(name) or start}"
        raise ValueError(f"{name} cannot be imported here ({summary(error)}){more}") from error
    try:
        found = functools.reduce(getattr, attribute.split("."), imported)
    except AttributeError:
        raise ValueError(f"the module {module} has no {attribute}") from None
    if not callable(found):
        raise ValueError(f"{name} has the type {type(found).__name__} and is not a function")
    return found


def as_module(name: str) -> str:
    """Advice for the name of a file, or of a module alone, in place of MODULE:NAME; "" for other names."""
    path, _, attribute = name.partition(":")
    plain = Path(path.removesuffix(".py"))
    is_file = path.endswith(".py") or Path(f"{plain}.py").is_file() or (plain / "__init__.py").is_file()
    wanted = f"{plain.name}:{attribute or 'NAME'}"
    return f"write {wanted}, and start the command in the module's folder" * (is_file and wanted != name)


def import_tensorflow_for(module: str) -> None:
    """Imports TensorFlow before a user's module that names it or Keras, to hide TensorFlow's start-up lines.

    The output of the user's module itself is never held back.
    """
    if module in sys.modules or "tensorflow" in sys.modules or (home := home_of(module)) is None:
        return
    package, *rest = module.split(".")
    files = [home.joinpath(*rest, "__init__.py"), home.joinpath(*(rest or [package])).with_suffix(".py")]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    if any(_NEEDS_TENSORFLOW.search(text) for text in texts):
        with quiet_start(), contextlib.suppress(ImportError):
            importlib.import_module("tensorflow")


def home_of(module: str) -> Path | None:
    """The folder of a user's package, or of the file of a module; None if there is none."""
    spec = PathFinder.find_spec(module.partition(".")[0])
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def required_arguments(function: Callable[..., Any]) -> int:
    """The number of positional arguments that a call must give; 1 for a callable without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def search_path() -> str:
    """The folders from which this process imports a user's modules, as PYTHONPATH of other processes."""
    installed = (sys.prefix, sys.base_prefix)
    places = [Path(place or Path.cwd()) for place in sys.path]
    return os.pathsep.join(str(p) for p in places if not any(p.is_relative_to(root) for root in installed))


def _name_of(make: Callable[..., Any]) -> str:
    if isinstance(make, functools.partial):
        arguments = [*map(repr, make.args), *(f"{key}={value!r}" for key, value in make.keywords.items())]
        return f"{_name_of(make.func)}({', '.join(arguments)})"
    owner = None if isinstance(make, types.BuiltinFunctionType) else getattr(make, "__self__", None)
    if isinstance(owner, type):  # of a class method, which may be inherited
        return f"{_module_of(owner)}:{owner.__qualname__}.{make.__name__}"
    of = make if hasattr(make, "__qualname__") else type(make)
    name = f"{_module_of(of)}:{of.__qualname__}"
    return name if of is make and owner is None else f"{name}()"


def _module_of(thing: Any) -> str:
    """The name of the module from which other processes import an object; for the main program, its file's
    name.
    """
    if thing.__module__ != "__main__":
        return thing.__module__
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return spec.name
    file = Path(getattr(main, "__file__", ""))
    return file.stem if file.stem.isidentifier() and file.suffix == ".py" else "__main__"
