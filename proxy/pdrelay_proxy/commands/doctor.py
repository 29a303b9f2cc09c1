"""``pdrelay doctor``: a command of the connector, which is loaded by its name where its libraries are installed.

The router does not import the connector, and works without it.
"""

import argparse
import importlib
import sys
from typing import Final

COMMAND: Final = "pdrelay_connector.doctor.command"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the connector's command, or say how to get it."""
    try:
        command = importlib.import_module(COMMAND)
    except ModuleNotFoundError as exc:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        parser.set_defaults(run=_explain, missing=exc.name)
        return
    command.add_arguments(parser)


def _explain(args: argparse.Namespace) -> int:
    sys.stderr.write(f"pdrelay doctor: {args.missing} is not installed; install pdrelay[connector] on this machine\n")
    return 2
