"""python -m tfrl.completion: print a bash script that completes all commands, their flags and choices.

It completes `tfrl COMMAND` and `python -m MODULE`.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from tfrl.__main__ import COMMANDS
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag, without_none
from tfrl.cli.settings import Reader

_SCRIPT = """_tfrl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} module= words= i
  if [[ ${{COMP_WORDS[0]}} == tfrl ]]; then
    module=tfrl.${{COMP_WORDS[1]}}
    ((COMP_CWORD == 1)) && words="{names}"
  else
    for ((i = 1; i < COMP_CWORD; i++)); do
      [[ ${{COMP_WORDS[i]}} == -m ]] && module=${{COMP_WORDS[i+1]}}  # the last one: a launcher has two
    done
    [[ $before == -m ]] && words="{modules}"
    [[ $before == tfrl && $module == tfrl ]] && words="{names}"
  fi
  for ((i = 2; i < COMP_CWORD; i++)); do  # python -m tfrl ppo, tune -- ppo
    [[ $module == tfrl || $module == tfrl.tune ]] && [[ ${{COMP_WORDS[i-1]}} != --?* ]] &&
      [[ " {names} " == *" ${{COMP_WORDS[i]}} "* ]] && module=tfrl.${{COMP_WORDS[i]}}
  done
  if [[ -z $words ]]; then
    case "$module $before" in
{choices}
    esac
    [[ -z $words && $word == -* ]] && case $module in
{flags}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _tfrl python python3 tfrl
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the script; returns the exit code."""
    if any(a in ("-h", "--help", "--help-all") for a in arguments):
        print('usage: eval "$(python -m tfrl.completion)", for example in ~/.bashrc')
        return 0
    if arguments:
        raise UserError(f"python -m tfrl.completion takes no arguments; got {arguments[0]}.")
    print(script(_flags()), end="")
    return 0


def script(flags: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The script, from the flags and their choices by module."""
    choices = [
        f'      "{module} {name}") words="{" ".join(values)}" ;;'
        for module, of_module in flags.items()
        for name, values in of_module.items()
        if values
    ]
    lines = [f'      {module}) words="{" ".join(of_module)}" ;;' for module, of_module in flags.items()]
    names = " ".join(m.removeprefix("tfrl.") for m in flags if m.startswith("tfrl."))
    return _SCRIPT.format(
        names=names, modules=" ".join(flags), choices="\n".join(choices), flags="\n".join(lines)
    )


def _flags() -> dict[str, dict[str, list[str]]]:
    """The flags of every command, each with its choices."""
    flags = {}
    for name in COMMANDS:
        module = importlib.import_module("resnet.__main__" if name == "resnet" else name)
        # The trainers' `main` has a reader; that of resnet.train is in its module.
        found = [getattr(getattr(module, "main", None), "reader", None), *vars(module).values()]
        reader = next((value for value in found if isinstance(value, Reader)), None)
        if reader is not None:
            flags[name] = _of_kinds(reader.flag_kinds, reader.kind.aliases)
        else:
            flags[name] = _of_kinds(typing.get_type_hints(getattr(module, "Options", object)), {})
    return flags


def _of_kinds(kinds: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        kind = without_none(kind)
        flags[flag(name)] = list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []
        if kind is bool:
            flags[flag(f"no_{name}")] = []
    return flags | {flag(alias): flags[flag(name)] for alias, name in aliases.items()}


if __name__ == "__main__":
    endings.run(main)
