"""python -m cluster.tf_config: print TF_CONFIG, or check the one that is set."""

import json
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.workers import tf_config

USAGE = "python -m cluster.tf_config ([--template NAME] [--hosts A:2222,B:2222] --index I | --check)"
DESCRIPTION = """Prints the line that sets TF_CONFIG on one machine of a cluster, or checks TF_CONFIG.

  python -m cluster.tf_config --hosts a:2222,b:2222 --index 0     for the first machine
  python -m cluster.tf_config --hosts a:2222,b:2222 --index 1     for the second
  python -m cluster.tf_config --template four-machines --index 2  for the third machine of a template
  python -m cluster.tf_config --check                             on each of them, once it is set

The templates are one-machine-two-processes, two-machines, four-machines and chief-workers-evaluator."""
TEMPLATES = Path(__file__).with_name("templates")
ANSWER_WITHIN = 2.0  # seconds


@dataclass(frozen=True)
class Options:
    """The flags."""

    template: str | None = None
    """A template of cluster/templates/, or such a JSON file; --hosts and --evaluator replace its hosts."""
    hosts: str | None = None
    """host:port of every training process, separated by commas, in the same order on every machine."""
    index: str | None = None
    """Number of this process among --hosts, from 0; or 'evaluator'."""
    evaluator: str | None = None
    """host:port of a process that evaluates and does not train."""
    check: bool = False
    """Check the TF_CONFIG that is set, and which processes answer."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or raises UserError for bad flags, a bad TF_CONFIG or a taken port."""
    words, options = flags.parse(Options, arguments, USAGE, DESCRIPTION)
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {USAGE}")
    if options.check:
        return check()
    if not (options.hosts or options.template) or not options.index:
        raise UserError(
            "give --hosts a:2222,b:2222 and --index I, or --template NAME and --index I, or --check"
        )

    hosts, evaluator = _addresses(options)
    index = options.index
    cluster = {"worker": hosts}
    if evaluator:
        cluster["evaluator"] = [evaluator]
    if index == "evaluator":
        task = {"type": "evaluator", "index": 0}
    elif not re.fullmatch(r"[0-9]+", index) or int(index) >= len(hosts):
        raise UserError(f"--index is {index!r}; it must be 0 to {len(hosts) - 1}, or 'evaluator'")
    else:
        task = {"type": "worker", "index": int(index)}
    text = tf_config.parse(json.dumps({"cluster": cluster, "task": task})).to_json()
    print(f"export TF_CONFIG={shlex.quote(text)}")
    return 0


def _addresses(options: Options) -> tuple[list[str], str | None]:
    """The addresses of the training processes, and that of the evaluator. Raises UserError."""
    hosts = options.hosts.split(",") if options.hosts else []
    if options.template is None:
        return hosts, options.evaluator
    template = _read_template(options.template)
    if hosts and len(hosts) != template.num_workers:
        raise UserError(
            f"--template {options.template} has {template.num_workers} training processes, and --hosts names "
            f"{len(hosts)}"
        )
    return hosts or list(template.workers), options.evaluator or template.evaluator


def _read_template(name: str) -> tf_config.TFConfig:
    """The template of this name, or that of a file. Raises UserError if there is none or it is wrong."""
    known = sorted(path.stem for path in TEMPLATES.glob("*.json"))
    path = TEMPLATES / f"{name}.json" if name in known else Path(name)
    try:
        text = path.read_text()
    except (OSError, ValueError):
        raise UserError(
            f"--template {name} is neither a file that can be read nor one of {', '.join(known)}"
        ) from None
    return tf_config.parse(text)


def check() -> int:
    """Prints what TF_CONFIG says, and which processes answer. UserError: it is wrong; a port is taken."""
    config = tf_config.read()
    if config is None:
        raise UserError(
            "TF_CONFIG is not set; python -m cluster.tf_config --hosts a:2222,b:2222 --index 0 makes it"
        )
    me = None if config.is_evaluator else config.worker
    print(
        f"TF_CONFIG is valid: this process is {'the evaluator' if me is None else config.name(me)}, "
        f"{config.num_workers} workers train, {config.name(0)} is the chief."
    )
    if config.address:
        tf_config.reserve_port(config).close()
        print(f"Its own port, {config.address}, is free on this machine.")
    silent = False
    for worker in (worker for worker in range(config.num_workers) if worker != me):
        answer = "answers"
        try:
            address = tf_config.split_address(config.workers[worker])
            socket.create_connection(address, timeout=ANSWER_WITHIN).close()
        except OSError as error:
            answer, silent = f"does not answer: {error.strerror or error}", True
        except UnicodeError:
            answer, silent = "does not answer: not the name of a host", True
        print(f"{config.name(worker)} {answer}")
    if silent:
        print("A worker that has not started yet does not answer: this is a fault only for one that has.")
    return 0


if __name__ == "__main__":
    endings.run(main)
