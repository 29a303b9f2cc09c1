"""``pdrelay serve --check`` and ``--print-config``: the faults of the settings, and their
values.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.commands.engine_sources import check_engines
from pdrelay_proxy.consistency import faults
from pdrelay_proxy.console.tables import printable
from pdrelay_proxy.errors import AddressError, AlreadyKnown, ConfigError
from pdrelay_proxy.known_settings import OPTIONS, SECRETS, Setting
from pdrelay_proxy.options import Choices, choose
from pdrelay_proxy.settings import Settings

RIGHT = 0
WRONG = 2
_CREDENTIALS: Final = re.compile(r"(?<=//)[^/@\s]*@")  # of a URL, before its host
_VALUE_WIDTH: Final = 48  # columns, before the source


def check_settings(args: argparse.Namespace) -> int:
    """Print how to correct each wrong setting; return the exit code."""
    wrong = find_faults(args)
    for sentence in wrong:
        sys.stderr.write(f"pdrelay serve: {printable(sentence)}\n")
    if wrong:
        return WRONG
    sys.stdout.write("The settings are right. Engines were not asked: pdrelay check does that.\n")
    return RIGHT


def print_settings(args: argparse.Namespace) -> int:
    """Print all settings in effect, in the format of their file; return the exit code."""
    try:
        choices = choose(args)
    except ConfigError as exc:
        sys.stderr.write(f"pdrelay serve: {printable(str(exc))}\n")
        return WRONG
    sys.stdout.write(printable(settings_text(choices)))
    for sentence in choices.wrong.values():
        sys.stderr.write(f"pdrelay serve: {printable(sentence)}\n")
    return WRONG if choices.wrong else RIGHT


def find_faults(args: argparse.Namespace) -> Sequence[str]:
    """Return a sentence for each fault: wrong values, contradictions, files."""
    try:
        choices = choose(args)
    except ConfigError as exc:
        return [str(exc)]
    settings = choices.settings()
    # A wrong setting has its default here: contradictions with that are no faults of their own.
    consequences = [
        sentence
        for sentence in faults(settings)
        if not any(_names(sentence, name) for name in choices.wrong)
    ]
    sentences = [*choices.wrong.values(), *consequences]
    return sentences or _fault_of_building(settings, args.config)


def settings_text(choices: Choices) -> str:
    """Return the settings in their file's format, each with its source; never a secret."""
    settings = choices.settings()
    lines = list[str]()
    group = ""
    for setting in OPTIONS.values():
        if setting.option.group.title != group:
            group = setting.option.group.title
            lines += [f"# {group[0].upper()}{group[1:]}"]
        choice = choices.right.get(setting.name)
        lines.append(
            _line(setting, setting.value(settings), "default" if choice is None else choice.source)
        )
    lines.append("# Secrets, from the environment")
    for name, secret in SECRETS.items():
        state = "set, and not shown" if secret.value(settings) is not None else "not set"
        lines.append(f"# {name}: {state} ({secret.option.environment})")
    return "".join(f"{line}\n" for line in lines)


def _line(setting: Setting, value: object, source: str) -> str:
    if value is None or value == ():
        return f"{f'# {setting.name}: {setting.option.unset}':<{_VALUE_WIDTH}}  # {source}"
    written = json.dumps(value, ensure_ascii=False)  # as TOML writes it
    hidden = _CREDENTIALS.sub("***@", written)
    comment = "# " if hidden != written else ""
    return f"{f'{comment}{setting.name} = {hidden}':<{_VALUE_WIDTH}}  # {source}"


def _names(sentence: str, setting: str) -> bool:
    return re.search(rf"\b{setting}\b", sentence) is not None


def _fault_of_building(settings: Settings, config: str | None) -> Sequence[str]:
    """Build the router, which starts nothing, to find faults that show only then."""
    from pdrelay_proxy.app import build  # noqa: PLC0415 (it takes a second, and most faults show without it)

    try:
        check_engines(settings, config)
        build(settings)
    except AlreadyKnown as exc:
        return [f"{exc}: name every engine once"]
    except (ConfigError, AddressError) as exc:
        return [str(exc)]
    return []
