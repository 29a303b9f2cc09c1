"""A package index on loopback: what product and documents tell people to install is ours, beside another's family.

The index has our wheels, an empty wheel for each library that we need, and wheels of another family of packages with
the name that this product had before: it is for the same job, and its command must stay its own.
"""

import base64
import csv
import functools
import hashlib
import http.server
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OTHER = "x" + "pyd"  # on PyPI: a router, and its family
FAMILY = [OTHER, *(f"{OTHER}-{part}" for part in ("proxy", "sim", "bench", "acc", "plan"))]
EXTRAS = ["proxy", "tools", "connector", "tracing", "completion", "redis"]
SENTENCE = re.compile(r"pip install '((?:pdrelay|" + OTHER + r")[^']*)'")
TOLD = [path for folder in ("proxy", "connector", "tools") for path in (ROOT / folder).rglob("*.py")]
TOLD += [path for folder in ("docs", "examples", "helm", "tools") for path in (ROOT / folder).rglob("*.md")]
TOLD += ROOT.glob("*.md")

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def write_wheel(folder, name, version, *, command=None):
    """Write a wheel with an empty package, and a command if it has one."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if command is not None:
        files[f"{module}_of_another/__init__.py"] = "def main():\n    print('another')\n"
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{command} = {module}_of_another:main\n"
    lines = []
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{len(text)}")
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")


def needed():
    """Return the libraries that our extras name, with the versions that are installed here."""
    found = {}
    for text in importlib.metadata.requires("pdrelay"):
        name = Requirement(text).name
        if name != "pdrelay-tools":
            found[name.lower()] = importlib.metadata.version(name)
    return found


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The address of the index."""
    folder = tmp_path_factory.mktemp("index")
    wheels = folder / "wheels"
    wheels.mkdir()
    for project in (ROOT, ROOT / "tools"):
        argv = [ROOT / "helm/images/build-wheel.sh", project, wheels]
        done = subprocess.run(
            argv, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    for name, version in needed().items():
        write_wheel(wheels, name, version)
    for name in FAMILY:
        write_wheel(wheels, name, "1.8.0", command=name)
    for wheel in wheels.iterdir():
        project = folder / "simple" / wheel.name.partition("-")[0].replace("_", "-").lower()
        project.mkdir(parents=True, exist_ok=True)
        shutil.move(wheel, project)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as an index, whose pages are lists of links (PEP 503)."""

    def log_message(self, *_):
        """Say nothing."""


def pip(index, *arguments, python=sys.executable):
    argv = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--isolated"]
    argv += [arguments[0]]
    if arguments[0] == "install":
        argv += ["--quiet", "--index-url", index, "--no-cache-dir", "--no-compile"]
    return subprocess.run([*argv, *arguments[1:]], capture_output=True, text=True, check=False, timeout=120)


def environment(folder, python):
    """Make an empty environment of a Python; return its interpreter."""
    if python == sys.executable:
        venv.create(folder, with_pip=False)
    else:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    return folder / "bin/python"


def files_of(folder):
    """Return the files of each distribution that is installed, as its RECORD names them."""
    found = {}
    for record in folder.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            found[record.parent.name] = {
                (record.parent.parent / line[0]).resolve() for line in csv.reader(lines) if "__pycache__" not in line[0]
            }
    return found


def pythons():
    """Return this Python, and the others that are supported and to be had here."""
    yield pytest.param(sys.executable, id="this")
    for minor in (11, 12, 13, 14):
        found = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"), shutil.which(f"python3.{minor}")]
        if minor != sys.version_info.minor and found[0]:
            yield pytest.param(str(found[0]), id=f"3.{minor}")


STEPS = {"router": ["pdrelay[proxy]"], "connector": ["pdrelay[connector]"], "family": FAMILY}
in_each_python = pytest.mark.parametrize("python", [*pythons()])
in_any_order = pytest.mark.parametrize("order", [*itertools.permutations(STEPS)], ids="-".join)


def install(index, python, order):
    """Install our package and the other family, one after the other."""
    for step in order:
        done = pip(index, "install", *STEPS[step], python=python)
        assert done.returncode == 0, done.stderr


def overlaps(files):
    """Return the files that belong to two distributions."""
    return [path for a, b in itertools.combinations(files.values(), 2) for path in a & b]


@in_each_python
@in_any_order
def test_both_families_live_side_by_side(index, tmp_path, python, order):
    """No file belongs to two, each command is its own, and one family goes without a file of the other."""
    here = environment(tmp_path / "env", python)
    install(index, here, order)

    files = files_of(tmp_path / "env")
    ours = f"pdrelay-{importlib.metadata.version('pdrelay')}.dist-info"
    assert {ours} < files.keys()
    assert overlaps(files) == []
    checked = pip(index, "check", python=here)
    assert (checked.returncode, checked.stderr) == (0, "")
    theirs = subprocess.run([tmp_path / "env/bin" / OTHER], capture_output=True, text=True, check=True, timeout=60)
    assert theirs.stdout == "another\n"
    assert "from pdrelay_proxy.cli import main" in (tmp_path / "env/bin/pdrelay").read_text()
    assert pip(index, "uninstall", "--yes", *FAMILY, python=here).returncode == 0
    assert not (tmp_path / "env/bin" / OTHER).exists()
    assert [path for path in files[ours] if not path.exists()] == []


@pytest.mark.thorough  # fetches the libraries of the router for each Python
@in_each_python
@pytest.mark.parametrize("order", [("router", "family"), ("family", "router")], ids="-".join)
def test_both_commands_work_in_each_python(index, tmp_path, python, order):
    """With the libraries that the image installs, in place of empty ones."""
    here = environment(tmp_path / "env", python)
    install(index, here, order)
    argv = [sys.executable, "-m", "pip", "--python", here, "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    argv += ["--force-reinstall", "--require-hashes", "-r", ROOT / "helm/images/requirements-router.txt"]
    subprocess.run(argv, check=True, capture_output=True, timeout=200)
    theirs, ours = (
        subprocess.run(
            [tmp_path / "env/bin" / command, "--version"], env={}, capture_output=True, text=True, check=True
        )
        for command in (OTHER, "pdrelay")
    )

    assert theirs.stdout == "another\n"
    assert ours.stdout.startswith(f"pdrelay {importlib.metadata.version('pdrelay')} ")
    assert overlaps(files_of(tmp_path / "env")) == []
    assert pip(index, "check", python=here).returncode == 0


def test_the_command_runs_from_an_environment_of_its_own(index, tmp_path):
    """As pipx and uvx do: with the extra for the router, without vLLM, and then with the tools."""
    here = environment(tmp_path / "env", sys.executable)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not found.name.startswith(("pdrelay", "vllm", "nixl", "torch", "__editable__", "_pdrelay")):
            (libraries / found.name).symlink_to(found)

    def run(*words):
        return subprocess.run(
            [tmp_path / "env/bin/pdrelay", *words],
            env={"PYTHONPATH": str(libraries)}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    assert pip(index, "install", "pdrelay[proxy]", python=here).returncode == 0
    version = run("--version")
    router = run("serve", "--check", "--prefill", "p0:1", "--decode", "d0:1")
    without = run("check", "--help")
    doctor = run("doctor", "--help")
    assert pip(index, "install", "pdrelay[tools]", python=here).returncode == 0
    tools = run("check", "--help")

    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith(f"pdrelay {importlib.metadata.version('pdrelay')} ")
    assert router.returncode == 0, router.stderr
    assert (without.returncode, "pip install 'pdrelay[tools]'" in without.stderr) == (2, True)
    assert (doctor.returncode, doctor.stdout.startswith("usage: pdrelay doctor")) == (0, True), doctor.stderr
    assert (tools.returncode, tools.stdout.startswith("usage: pdrelay check")) == (0, True), tools.stderr


def sentences():
    return sorted({found for path in TOLD for found in SENTENCE.findall(path.read_text())})


@pytest.mark.parametrize("wanted", sorted({*sentences(), *(f"pdrelay[{extra}]" for extra in EXTRAS)}))
def test_what_people_are_told_to_install_is_ours(index, tmp_path, wanted):
    """Errors of the product and pages of the documents: each sentence installs this product, with an extra it has."""
    report = tmp_path / "report.json"
    done = pip(index, "install", "--dry-run", "--ignore-installed", "--report", str(report), wanted)

    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    names = {one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]}
    assert "pdrelay" in names
    assert names.isdisjoint(FAMILY)
