"""Reads Dockerfiles, and knows the rules that matter for ours."""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECRET = re.compile(r"(?i)(passw|secret|token|api_?key|credential)")
COMPILERS = re.compile(r"\b(gcc|g\+\+|build-essential|cargo|rustc|clang|cmake)\b")


@dataclass(frozen=True)
class Step:
    """One instruction, its lines joined."""

    word: str
    rest: str

    @property
    def flags(self):
        return re.findall(r"--(\w+)=(\S+)", self.rest)

    @property
    def operands(self):
        return [word for word in self.rest.split() if not word.startswith("--")]


def stages(text):
    """Return the steps before the first FROM, and those of each stage, beginning with its FROM."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    found = [[]]
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            found.append([])
        found[-1].append(Step(word.upper(), rest.strip()))
    return found


def faults(text):
    """Return what is wrong with a Dockerfile beside what hadolint knows, one sentence each."""
    parts = stages(text)
    every = [step for part in parts for step in part]
    return [*_adds(every), *_secrets(every), *_last(parts[-1])]


def _adds(every):
    for step in every:
        if step.word == "ADD":
            yield f"ADD {step.rest}: COPY does not unpack and does not fetch"
        if step.word == "RUN" and re.search(r"\b(curl|wget)\b", step.rest):
            yield f"RUN fetches something that nothing verifies: {step.rest}"


def _secrets(every):
    for step in every:
        if step.word in ("ARG", "ENV"):
            for name in re.findall(r"(\w+)(?==|$)", step.rest):
                if SECRET.search(name):
                    yield f"{step.word} {name} would stay in the image for everybody to read"


def _last(part):
    users = [step.rest for step in part if step.word == "USER"]
    user = users[-1].partition(":")[0] if users else ""
    if not user.isdigit():
        yield "the last stage names no USER by number: Kubernetes cannot tell whether it is root"
    elif user == "0":
        yield "the last stage runs as root"
    for step in part:
        if step.word == "RUN" and COMPILERS.search(step.rest):
            yield f"the last stage has a compiler: {step.rest}"


def copied(text):
    """Return the paths that a Dockerfile copies out of the repository, as patterns."""
    steps = [step for part in stages(text) for step in part if step.word == "COPY"]
    return [source for step in steps if "from" not in dict(step.flags) for source in step.operands[:-1]]


def let_through(ignore, path):
    """Tell whether a .dockerignore lets a file get into a build; the last rule that fits decides."""
    verdict = True
    for rule in filter(None, (line.split("#")[0].strip() for line in ignore.splitlines())):
        pattern = rule.lstrip("!")
        parts = [path, *map(str, Path(path).parents)]
        if any(fnmatch.fnmatch(part, pattern) for part in parts):
            verdict = rule.startswith("!")
    return verdict
