"""The documents, as the tests read them: pages, their blocks, and the commands that people paste."""

import argparse
import itertools
import re
import shlex
from pathlib import Path

from pdrelay_proxy.cli import build_parser

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "helm", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PAGES.remove(ROOT / "CHANGELOG.md")  # it names what is gone
COMMANDS = ("serve", "up", "check", "chat", "plan", "replay", "instances", "pairs", "why", "doctor", "prove")
END = {"|", "&&", "||", "&", ";", ">"}  # of a command in a line
_BLOCK = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```")


def blocks(text, language=None):
    """Return the blocks of code, or those of one language."""
    return [block for name, block in _BLOCK.findall(text) if language in (None, name)]


def block_lines(text):
    """Yield the lines of code blocks, those that go on joined."""
    for block in blocks(text):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def spans(text):
    """Yield what is in backquotes."""
    for span in re.findall(r"(?s)`([^`]+)`", _BLOCK.sub("", text)):
        yield " ".join(span.split())


def words(line):
    """Split a line as a shell does; comments go, and the brackets of what may be left out."""
    line = line.replace(";", " ; ")
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # one quote of a pair that another line has
        found = line.partition(" #")[0].split()
    return [
        word.strip("[](){},.") if not word.startswith("-") or word == "--" else word.strip("],.)") for word in found
    ]


def commands(line):
    """Yield the commands of a line that can be judged: what it is, its name there, its words."""
    found = words(line)
    for i, word in enumerate(found):
        rest = [*itertools.takewhile(lambda word: word not in END, found[i + 1 :])]
        path = f"{word.replace('.', '/')}.py" if word.startswith("benchmarks.") else word
        if path.endswith(".py") and (ROOT / path).is_file():
            yield "script", path, rest
        elif rest and word == "pdrelay" and rest[0] in COMMANDS:
            yield "pdrelay", rest[0], rest[1:]
        elif rest and word == "vllm" and rest[0] in ("serve", "bench"):
            yield "vllm", rest[0], rest[1:]
        elif rest and word == "make" and (i == 0 or line.startswith("$")):
            yield "make", "make", rest


def flags_of(arguments):
    return {word.partition("=")[0] for word in arguments if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}


def known(parser):
    """All flags and verbs of a parser."""
    found = {flag for flag in parser._option_string_actions if flag.startswith("--")}
    for action in parser._actions:
        for name, one in action.choices.items() if isinstance(action, argparse._SubParsersAction) else ():
            found |= {name, *known(one)}
    return found


def command(name):
    """The parser of ``pdrelay NAME``."""
    commands = next(a for a in build_parser([name])._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]


OURS = {name: known(command(name)) for name in COMMANDS}
