"""The images' own scripts, run outside of a container; and their Dockerfiles, read."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from pdrelay_proxy.cli import build_parser
from support.cluster import free_ports
from support.dockerfiles import ROOT, copied, faults, let_through, stages

pytestmark = pytest.mark.processes


IMAGES = ROOT / "helm/images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    "requirements-router.txt": ["proxy"],
    "requirements-router-tracing.txt": ["proxy", "tracing"],
}
NOT_REACHED = re.compile(r"(?i)new connection|connection refused|timed out|name resolution|unreachable")
with_pip = pytest.mark.slow  # pip builds a wheel, makes an environment and installs into it


def _run(script, *arguments, **options):
    environment = {**os.environ, "PYTHON": sys.executable, **options.pop("env", {})}
    command = [str(IMAGES / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What the Dockerfiles copy, and nothing else; somebody may be editing the original."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("proxy", "connector"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """Built as both images build it."""
    folder = tmp_path_factory.mktemp("wheel")
    done = _run("build-wheel.sh", source, folder)
    assert done.returncode == 0, done.stderr
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def router(wheel, tmp_path_factory):
    """An environment as it is in the router's image."""
    folder = tmp_path_factory.mktemp("router") / "opt"
    done = _run("install-router.sh", folder, wheel)
    if done.returncode and NOT_REACHED.search(done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def _pins(file):
    """Return name and version of every line that is installed here."""
    logical = re.sub(r"\\\n", " ", (ROOT / file).read_text()).splitlines()
    lines = [line for line in logical if line.strip() and not line.startswith("#")]
    found = [Requirement(line.partition("--hash")[0].strip()) for line in lines]
    return {one.name: str(one.specifier)[2:] for one in found if one.marker is None or one.marker.evaluate()}


def _packages(folder):
    code = "import json; from importlib import metadata as m; print(json.dumps([d.name for d in m.distributions()]))"
    out = subprocess.run([folder / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    return {re.sub(r"[-_.]+", "-", name).lower() for name in json.loads(out)}


@with_pip
def test_the_wheel_has_both_packages_and_nothing_else(wheel):
    """No tests, no tools, no compiled leftovers, no files of a developer; the page and the markers are in it."""
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0] for name in names} == {
        "pdrelay_proxy",
        "pdrelay_connector",
        f"pdrelay-{PROJECT['version']}.dist-info",
    }
    assert not [name for name in names if name.endswith(".pyc") or "test" in name]
    assert {"pdrelay_proxy/api/status.html", "pdrelay_proxy/py.typed", "pdrelay_connector/py.typed"} <= set(names)


@with_pip
def test_one_source_makes_one_wheel(source, wheel, tmp_path):
    """Byte for byte: whoever doubts an image can build it again."""
    assert _run("build-wheel.sh", source, tmp_path).returncode == 0
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@with_pip
def test_the_router_has_what_its_requirements_name_and_nothing_else(router):
    """No pip to install more with, no tools of developers, no engine."""
    assert _packages(router) == {*_pins("helm/images/requirements-router.txt"), "pdrelay"}
    assert not list(router.glob("bin/pip*"))


@with_pip
def test_the_router_imports_without_an_engine(router):
    """And so does the connector's package, which comes in the same wheel."""
    code = (
        "import sys, pdrelay_proxy.app, pdrelay_connector.settings; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([router / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@contextmanager
def _confined(router, tmp_path, *arguments):
    """Start the router like a pod does: an empty environment, no home, a directory that nobody may write to."""
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir(mode=0o555)
    environment = {"PATH": f"{router}/bin", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(nowhere)}
    command = [str(router / "bin/pdrelay"), *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=nowhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
    assert not list(nowhere.iterdir())


def _files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@with_pip
def test_the_router_serves_and_ends_without_writing_a_file(router, tmp_path):
    """Its root is read-only: whatever it wrote to would fail there. It answers, and SIGTERM ends it with 0."""
    before = _files(router)
    (port,) = free_ports(1)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--health-check-interval", "0"]
    with _confined(router, tmp_path, "serve", *flags, "--prefill", "127.0.0.1:9", "--decode", "127.0.0.1:9") as process:
        assert _answered(f"http://127.0.0.1:{port}/ready", process) == 200
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)

    assert process.returncode == 0, out
    assert _files(router) == before


def _answered(url, process):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return httpx.get(url, trust_env=False, timeout=20).status_code
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail(f"no answer: {process.stdout.read() if process.poll() is not None else 'it runs'}")


@with_pip
@pytest.mark.parametrize("command", [["serve", "--help"], ["why", "--help"], ["instances", "--help"]], ids=" ".join)
def test_every_command_of_the_image_helps(router, tmp_path, command):
    """Nothing that a command imports is missing."""
    with _confined(router, tmp_path, *command) as process:
        out, _ = process.communicate(timeout=30)

    assert (process.returncode, out.startswith(f"usage: pdrelay {command[0]}")) == (0, True), out


def test_the_tools_are_of_the_version_of_the_router():
    """They use what may change between two versions; each of both wheels brings the other in its own version."""
    tools = tomllib.loads((ROOT / "tools/pyproject.toml").read_text())["project"]
    version = PROJECT["version"]

    assert tools["version"] == version
    assert tools["dependencies"] == [f"pdrelay[proxy]=={version}"]
    assert PROJECT["optional-dependencies"]["tools"] == [f"pdrelay-tools=={version}"]


@pytest.mark.parametrize(("file", "extras"), REQUIREMENTS.items(), ids=REQUIREMENTS)
def test_requirements_satisfy_the_package(file, extras):
    """Each thing that pyproject.toml asks for is pinned, in a version that it accepts and that the tests run with."""
    wanted = [*PROJECT["dependencies"], *(line for name in extras for line in PROJECT["optional-dependencies"][name])]
    pins = _pins(IMAGES / file)
    tested = _pins("requirements/engine.txt")

    for requirement in map(Requirement, wanted):
        name = requirement.name.replace("_", "-")
        assert requirement.specifier.contains(pins[name]), f"{file} has {name} {pins[name]}; `helm/images/lock.sh`"
    assert {name: tested[name] for name in pins if name in tested} == {n: v for n, v in pins.items() if n in tested}
    assert not {"pytest", "hypothesis", "mypy", "ruff", "vllm", "torch", "hatchling"} & set(pins)


def test_the_connectors_nixl_is_the_one_that_is_tested():
    """And build tools are those of the tests, too."""
    tested = _pins("requirements/engine.txt") | _pins("requirements/dev.txt")

    for file in ("requirements-nixl.txt", "requirements-build.txt"):
        pins = _pins(IMAGES / file)
        assert pins == {name: tested.get(name, version) for name, version in pins.items()}
    assert {"nixl", "nixl-cu12", "nixl-cu13"} == set(_pins(IMAGES / "requirements-nixl.txt"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment that stands for vLLM's image: it has pip, msgspec and numpy."""
    folder = tmp_path_factory.mktemp("engine") / "opt"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=200)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in ("msgspec", "numpy", "numpy.libs"):
        if (here := Path(sysconfig.get_path("platlib")) / name).exists():
            (site / name).symlink_to(here)
    return folder, site


@pytest.fixture
def engine(environment):
    """The same for one test, which may put a NIXL there."""
    yield environment
    for left in [*environment[1].glob("nixl-*"), *environment[1].glob("pdrelay*")]:
        shutil.rmtree(left)


def _nixl(site, version):
    info = site / f"nixl-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl\nVersion: {version}\n")


@with_pip
@pytest.mark.slow  # pip makes an environment
def test_the_connector_is_added_and_the_images_nixl_stays(engine, wheel):
    """The image chose its NIXL for its drivers; another one could not reach the NIC."""
    folder, site = engine
    _nixl(site, "1.5.1")
    before = _packages(folder)
    done = _run("install-engine.sh", wheel, env={"PYTHON": str(folder / "bin/python"), "PIP_NO_INDEX": "1"})

    assert (done.returncode, done.stderr) == (0, "install-engine.sh: NIXL 1.5.1 stays\n")
    assert _packages(folder) == {*before, "pdrelay"}


@with_pip
@pytest.mark.parametrize("there", ["none", "0.9.0", "1.4.2"])
def test_an_engine_without_a_usable_nixl_wants_the_locked_one(engine, wheel, there):
    """Here with an index that has nothing: the build ends, and no half of it is left."""
    folder, site = engine
    if there != "none":
        _nixl(site, there)
    nothing = {"PYTHON": str(folder / "bin/python"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    done = _run("install-engine.sh", wheel, env=nothing)

    assert done.returncode != 0
    assert f"NIXL here: {there}; installing that of requirements-nixl.txt" in done.stderr
    assert "pdrelay" not in _packages(folder)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("build-wheel.sh", [], "give the checkout and the folder for the wheel"),
        ("build-wheel.sh", ["/nowhere", "/tmp"], "/nowhere is not a checkout: it has no pyproject.toml"),
        ("install-router.sh", ["/tmp"], "give the folder and the wheel"),
        ("install-router.sh", ["/tmp", "x.whl"], "/tmp is there already, and must be new"),
        ("install-router.sh", ["/tmp/pdrelay-that-is-not", "x.whl"], "there is no file x.whl"),
        ("install-engine.sh", ["x.whl"], "there is no file x.whl"),
    ],
)
def test_a_script_that_cannot_do_it_says_so(script, arguments, said):
    """In one sentence with its own name, before it does anything."""
    done = _run(script, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script}: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_the_rules(file):
    """Neither image runs as root: where RDMA wants that, the pod says so."""
    assert faults(file.read_text()) == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_agrees(file):
    """A linter that more people know than ours."""
    if (hadolint := shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")) is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True, check=False, timeout=50)

    assert (done.returncode, done.stdout) == (0, "")


ROUTER = (IMAGES / "router.Dockerfile").read_text()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_what_a_dockerfile_copies_is_there_and_gets_through(file):
    """A .dockerignore that forgets a file breaks the build, one that forgets a rule lets everything in."""
    ignore = file.with_name(f"{file.name}.dockerignore").read_text()
    for pattern in copied(file.read_text()):
        found = list(ROOT.glob(pattern))
        files = [one for path in found for one in ([path] if path.is_file() else path.rglob("*.py"))]
        assert files, f"{pattern} is not there"
        assert all(let_through(ignore, str(one.relative_to(ROOT))) for one in files), pattern
    for secret in (".git/config", ".venv/bin/python", "tests/conftest.py", ".env", "helm/images/key.pem"):
        assert not let_through(ignore, secret)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_calls_scripts_that_can_be_called(file):
    """Which are there, executable, and copied before."""
    called = set(re.findall(r"[\w-]+\.sh\b", "".join(step.rest for part in stages(file.read_text()) for step in part)))

    assert called
    for script in called:
        assert os.access(IMAGES / script, os.X_OK)


def test_the_images_command_is_one_that_the_router_understands():
    """Entrypoint and command go through the router's own parser."""
    words = {step.word: json.loads(step.rest) for step in stages(ROUTER)[-1] if step.word in ("ENTRYPOINT", "CMD")}
    program, *arguments = [*words["ENTRYPOINT"], *words["CMD"]]

    assert program in PROJECT["scripts"]
    assert build_parser(arguments).parse_args(arguments).host == "0.0.0.0"
