"""``pdrelay check``: prints a line for each finding, and returns an exit code (docs/prove.md)."""

import argparse
import asyncio
import sys
from contextlib import aclosing
from typing import Final

from pdrelay_proxy.console.flag_values import seconds
from pdrelay_proxy.console.tables import printable
from pdrelay_proxy.core.one_line import one_line, shortened
from pdrelay_proxy.errors import AddressError, AlreadyKnown, ConfigError
from pdrelay_proxy.options import add_flags, serve_settings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.proving.core.readiness import ReadinessLine, is_ready, verdict
from pdrelay_tools.proving.readiness import examine

READY = 0
NOT_READY = 1
WRONG_USE = 2
_SECONDS: Final = 10.0
_FLAGS: Final = (  # of pdrelay serve, which says how it reaches its engines
    "prefill",
    "decode",
    "prefill_api_key_file",
    "decode_api_key_file",
    "engine_ca",
    "engine_cert",
    "engine_key",
    "engine_server_name",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_flags(parser, _FLAGS)
    file = (
        "the TOML file of pdrelay serve, which names its engines and how it reaches them (default: "
        "none)"
    )
    parser.add_argument("--config", metavar="FILE", help=file)
    help_text = "seconds for all of it (default: %(default)g)"
    parser.add_argument("--seconds", type=seconds, default=_SECONDS, metavar="S", help=help_text)
    parser.usage = "pdrelay check --prefill URL... --decode URL... [OPTION VALUE]..."
    parser.epilog = (
        "Keys are no flags: name files, or set PDRELAY_PREFILL_API_KEY and PDRELAY_DECODE_API_KEY."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return the exit code: 0 ready, 1 not ready or unknown, 2 wrong use."""
    try:
        lines = asyncio.run(_print_findings(_settings(args), args.seconds))
    except (ConfigError, AddressError, AlreadyKnown) as exc:
        sys.stderr.write(
            f"pdrelay check: "
            f"{exc}{': name every engine once' if isinstance(exc, AlreadyKnown) else ''}\n"
        )
        return WRONG_USE
    sys.stdout.write(f"{verdict(lines)}\n")
    return READY if is_ready(lines) else NOT_READY


def _settings(args: argparse.Namespace) -> Settings:
    """Read the settings; raises ConfigError: also if they name no engines."""
    settings = serve_settings(args)
    if not (settings.prefill and settings.decode):
        raise ConfigError("name engines of both roles: --prefill HOST:PORT --decode HOST:PORT")
    return settings


async def _print_findings(settings: Settings, seconds: float) -> list[ReadinessLine]:
    lines = list[ReadinessLine]()
    async with aclosing(examine(settings, seconds=seconds)) as findings:
        async for line in findings:
            lines.append(line)
            sys.stdout.write(f"{printable(shortened(one_line(str(line))))}\n")
            sys.stdout.flush()
    return lines
