"""python -m cluster.tf_config: writes TF_CONFIG, or checks the one that is set."""

import argparse
import json
import shlex
import socket
from collections.abc import Sequence

from cluster.arguments import Parser
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.workers import tf_config
from tfrl.workers.tf_config import TFConfig

DESCRIPTION = """Prints the line that sets TF_CONFIG on one machine of a cluster, or checks the one set.

  python -m cluster.tf_config --hosts a:2222,b:2222 --index 0     for the first machine
  python -m cluster.tf_config --hosts a:2222,b:2222 --index 1     for the second
  python -m cluster.tf_config --check                             on each of them, once it is set"""

ANSWER_WITHIN = 2.0  # seconds


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns 0, or raises UserError for bad flags, a bad TF_CONFIG or a taken port."""
    flags = parser().parse_args(arguments)
    if flags.check:
        if flags.hosts or flags.index or flags.evaluator or flags.chief:
            raise UserError("--check tests the TF_CONFIG that is set and takes no other flags")
        return _check()
    if not flags.hosts or not flags.index:
        raise UserError("give --hosts a:2222,b:2222 and --index I, or --check")
    config = make(flags.hosts.split(","), flags.index, chief=flags.chief, evaluator=flags.evaluator)
    print(f"export TF_CONFIG={shlex.quote(config.to_json())}")
    return 0


def make(hosts: list[str], index: str, *, chief: bool = False, evaluator: str | None = None) -> TFConfig:
    """The TF_CONFIG of one process.

    Args:
        hosts: "host:port" of each training process, all of them in the same order on every machine.
        index: which of them this one is, or "evaluator".
        chief: give the first of them the role "chief"; without it, it is worker 0. They do the same.
        evaluator: "host:port" of a process that evaluates and does not train.

    Raises:
        UserError: a bad address or index.
    """
    cluster = {"chief": hosts[:1], "worker": hosts[1:]} if chief else {"worker": hosts}
    if evaluator:
        cluster["evaluator"] = [evaluator]
    if index == "evaluator":
        if not evaluator:
            raise UserError("--index evaluator needs --evaluator host:port")
        task = {"type": "evaluator", "index": 0}
    elif not index.lstrip("-").isdecimal():
        raise UserError(f"--index is {index!r}; it must be 0 to {len(hosts) - 1}, or 'evaluator'")
    elif chief and int(index) == 0:
        task = {"type": "chief", "index": 0}
    else:
        task = {"type": "worker", "index": int(index) - chief}
    return tf_config.parse(json.dumps({"cluster": cluster, "task": task}))


def _check() -> int:
    config = tf_config.read()
    if config is None:
        raise UserError(
            "TF_CONFIG is not set; python -m cluster.tf_config --hosts a:2222,b:2222 --index 0 makes it"
        )
    me = None if config.is_evaluator else config.worker
    print(
        f"TF_CONFIG is valid: this process is {'the evaluator' if me is None else config.name(me)}, ", end=""
    )
    print(f"{config.num_workers} workers train, {config.name(0)} is the chief.")
    if config.address:
        tf_config.reserve_port(config).close()
        print(f"Its own port, {config.address}, is free on this machine.")
    silent = 0
    for worker in range(config.num_workers):
        if worker != me:
            fault = _fault(config.workers[worker])
            silent += fault is not None
            print(f"{config.name(worker)} {f'does not answer: {fault}' if fault else 'answers'}")
    if silent:
        print("A worker that has not started yet does not answer: this is a fault only for one that has.")
    return 0


def _fault(address: str) -> str | None:
    """Why nobody answers at `address`; None when somebody does."""
    try:
        socket.create_connection(tf_config.split_address(address), timeout=ANSWER_WITHIN).close()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "not the name of a host"
    return None


def parser() -> argparse.ArgumentParser:
    """The flags of this command."""
    parser = Parser("python -m cluster.tf_config", DESCRIPTION)
    parser.add_argument("--hosts", help="host:port of every training process, separated by commas")
    parser.add_argument("--index", help="which of --hosts this process is, from 0; or 'evaluator'")
    parser.add_argument("--chief", action="store_true", help="name the first of --hosts chief")
    parser.add_argument("--evaluator", help="host:port of a process that evaluates and does not train")
    parser.add_argument(
        "--check", action="store_true", help="test the TF_CONFIG that is set, and who answers"
    )
    return parser


if __name__ == "__main__":
    endings.run(main)
