"""Reads Dockerfiles, and knows the rules that matter for ours."""

import fnmatch
import json
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
    """Return what is wrong with a Dockerfile, one sentence each."""
    head, *parts = stages(text)
    args = dict(step.rest.split("=", 1) for step in head if step.word == "ARG")
    every = [step for part in (head, *parts) for step in part]
    checks = (_bases(parts, args), _adds(every), _secrets(every), _apt(every), _pip(every), _forms(every))
    found = [fault for check in checks for fault in check]
    return found + list(_last(parts[-1]))


def _bases(parts, args):
    names = set()
    for part in parts:
        words = part[0].rest.split()
        image = re.sub(r"\$\{(\w+)\}", lambda match: args.get(match[1], ""), words[0])
        tag = image.rpartition("/")[2].partition(":")[2].partition("@")[0]
        if image not in names and ("@sha256:" not in image and tag in ("", "latest")):
            yield f"the base image {image!r} has no tag, or one that moves"
        names |= {words[2]} if len(words) == 3 else set()


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


def _apt(every):
    for step in every:
        if step.word == "RUN" and "apt-get install" in step.rest and "rm -rf /var/lib/apt/lists" not in step.rest:
            yield "apt's lists stay in the layer"


def _pip(every):
    for step in every:
        if step.word == "RUN" and "pip install" in step.rest and "--require-hashes" not in step.rest:
            yield f"pip installs something without hashes: {step.rest}"


def _forms(every):
    for step in every:
        if step.word in ("ENTRYPOINT", "CMD"):
            try:
                json.loads(step.rest)
            except ValueError:
                yield f"{step.word} is in shell form: signals would go to the shell"


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
