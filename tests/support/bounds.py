"""The edge's tests with the oldest and the newest libraries that pyproject.toml allows, in environments of their own.

``python -P tests/support/bounds.py`` tries both and writes a part of docs/releasing.md; with
``--try uvicorn==0.60.0`` it tries these instead of the newest, and writes nothing.
"""

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".pdrelay/bounds"
RESULT = ROOT / "docs/releasing.md"
SHOWN = ("uvicorn", "httptools", "fastapi", "starlette", "pydantic", "httpx")
TESTS = ("tests/proxy/api", "tests/proxy/test_endpoints.py", "tests/proxy/test_clients_that_do_not_read.py")
TOOLS = (
    "pytest>=9",
    "pytest-asyncio>=1.5",
    "pytest-timeout>=2.4",
    "hypothesis>=6.100",
    "jsonschema>=4.26",
    "openai>=2.25",
    "cryptography>=43",
    "opentelemetry-exporter-otlp-proto-http>=1.30",  # one test has a router leave spans
    "opentelemetry-sdk>=1.30",
)
_LEAST = re.compile(r"^([\w-]+)>=([\w.]+)")


def requirements():
    """Return what the router needs, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["proxy"]]


def oldest(wanted):
    """Return the same with each lower bound as the version."""
    return [_LEAST.sub(r"\1==\2", one.partition(",")[0].partition(";")[0].strip()) for one in wanted]


def environment(name, wanted):
    """Make an environment anew; return its Python."""
    folder = KEPT / name
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin/python"
    install = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
    subprocess.run([*install, *wanted, *TOOLS], check=True, cwd=ROOT)
    subprocess.run([*install, "hatchling>=1.27"], check=True, cwd=ROOT)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "-e", ".", "-e", "./tools"], check=True, cwd=ROOT)
    return python


def tried(name, wanted):
    """Run the tests; return the versions, the last line and whether all passed."""
    python = environment(name, wanted)
    said = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True)
    found = dict(line.split("==", 1) for line in said.stdout.splitlines() if "==" in line)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/proxy", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().rpartition("\n")[2].strip("= ")
    print(f"{name}: {', '.join(f'{one} {found[one]}' for one in SHOWN)}: {last}", flush=True)
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], sep="\n")
    return found, re.sub(r" in .*", "", last), not done.returncode


def written(results):
    """Return the part of the page between its two headings."""
    rows = [[one, *(found[one] for _, (found, _, _) in results)] for one in SHOWN]
    rows.append(["tests", *(last for _, (_, last, _) in results)])
    lines = [
        "",
        "The edge derives from classes of uvicorn that are no public interface. So `pyproject.toml` bounds uvicorn and",
        "httptools from both sides, and `make test-bounds` runs the edge's tests with the oldest and the newest",
        "versions that it allows, each in an environment of its own. `make test-bounds TRY=uvicorn==0.60.0` tries",
        "another one. `tests/proxy/api/test_uvicorn_internals.py` names what is used, and fails with a sentence when a",
        "version lacks any of it.",
        "",
        "| | oldest | newest |",
        "|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "uvicorn 0.47 brought `ssl_context_factory`, without which the router cannot serve https. Up to 0.52 an",
        "answer to a client of HTTP/1.0 does not say that its connection is closed.",
        "",
    ]
    return "\n".join(lines)


def main():
    """Try them; the exit code says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="other", nargs="+", default=[], metavar="NAME==VERSION")
    other = parser.parse_args().other
    if other:
        named = {one.partition("==")[0] for one in other}
        kept = [one for one in requirements() if re.split(r"[<>=;]", one)[0] not in named]
        return 0 if tried("other", [*kept, *other])[2] else 1
    results = [("oldest", tried("oldest", oldest(requirements()))), ("newest", tried("newest", requirements()))]
    if not all(passed for _, (_, _, passed) in results):
        return 1
    before, heading, others = RESULT.read_text().partition("\n## Library versions\n")
    _, next_heading, rest = others.partition("\n### vLLM\n")
    RESULT.write_text(before + heading + written(results) + next_heading + rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
