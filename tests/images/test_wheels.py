"""The wheels of a release: pip takes the compiled one where it fits, and the pure one everywhere else."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.compiled import ROOT, NoCompiler, compiled_wheel

pytestmark = pytest.mark.processes


IMAGES = ROOT / "helm" / "images"
# What stands for python -m pip wheel: a file with the name that hatchling would give it.
PYTHON = """#!/bin/sh
name=pdrelay
[ ! -d pdrelay_tools ] || name=pdrelay_tools
[ "$2" != hatchling ] || { date +SDIST_TIME >"$7/$name-0.1.0.tar.gz"; exit; }
[ "$1" != -P ] || { cat "$4" >"$5"; exit; }
while [ "$1" != --wheel-dir ]; do shift; done
tag=py3-none-any
[ "${HATCH_BUILD_HOOK_ENABLE_CUSTOM:-}" != true ] || tag=cp3TH-cp3TH-linux_x86_64
case $3 in */tools) name=pdrelay_tools ;; esac
echo "$tag" >"$2/$name-0.1.0-$tag.whl"
"""
AUDITWHEEL = '#!/bin/sh\nshift 2\nfor w in "$2"; do cp "$w" "$1/$(basename "$w" | sed s/linux/manylinux_2_17/)"; done\n'


def script(*arguments, **more):
    argv = [IMAGES / "wheels.sh", *arguments]
    return subprocess.run(argv, env=os.environ | more, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def pythons(tmp_path):
    """Two that pretend to build, and what pretends to give the wheels another tag."""
    for name, text in {
        "python12": PYTHON.replace("TH", "12"), "python13": PYTHON.replace("TH", "13"), "auditwheel": AUDITWHEEL,
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return [str(tmp_path / name) for name in ("python12", "python13")]


@pytest.mark.parametrize(("audit", "tag"), [("auditwheel", "manylinux_2_17_x86_64"), ("none", "linux_x86_64")])
def test_a_release_has_the_pure_wheel_that_of_the_tools_and_one_for_each_python(pythons, tmp_path, audit, tag):
    """And their digests, to be signed."""
    audit = audit if audit == "none" else str(tmp_path / audit)
    done = script(str(tmp_path / "dist"), *pythons, AUDITWHEEL=audit)

    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "dist").iterdir()}
    assert found == {
        "pdrelay-0.1.0-py3-none-any.whl", f"pdrelay-0.1.0-cp312-cp312-{tag}.whl",
        f"pdrelay-0.1.0-cp313-cp313-{tag}.whl",
        "pdrelay_tools-0.1.0-py3-none-any.whl",
        "SHA256SUMS",
    }  # fmt: skip
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "dist", capture_output=True, check=False)
    assert check.returncode == 0


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("wheels.sh", [], "give the folder, and the Pythons to compile for"),
        ("build-environments.sh", [], "give the folder, and the Pythons to compile for"),
        ("build-environments.sh", ["made", "false"], "false is no CPython from 3.11 to 3.14 with its headers"),
        ("try-wheels.sh", ["."], "give the folder with the wheels, and the Pythons to try them with"),
        ("try-wheels.sh", [".", sys.executable], "has no compiled wheel for " + sys.executable),
    ],
)
def test_what_no_release_can_be_made_of_is_refused(tmp_path, name, arguments, sentence):
    """In a sentence, before anything is made."""
    argv = [IMAGES / name, *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr.count("\n"), [*tmp_path.iterdir()]) == (2, 1, [])
    assert done.stderr.startswith(f"{name}: ")
    assert sentence in done.stderr


TOOLS = {
    "helm": 'stat --format %Y "$2/Chart.yaml" >"$4/pdrelay-0.1.0.tgz"',
    "cyclonedx": 'while [ "$1" != --output-file ]; do shift; done\ncat >"$2"',
    "twine": 'echo "$1 $2: $#"',
}


def release(folder, pythons, tmp_path, **more):
    """Run release.sh with pretended Pythons and tools."""
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    more = {name.upper(): str(tmp_path / name) for name in TOOLS} | {"AUDITWHEEL": "none", **more}
    argv = [IMAGES / "release.sh", folder, *pythons]
    return subprocess.run(argv, env=os.environ | more, capture_output=True, text=True, check=False, timeout=60)


def test_a_release_has_all_files_and_their_digests(pythons, tmp_path):
    """It ends where an upload would begin."""
    folder = tmp_path / "release"
    done = release(folder, pythons, tmp_path)

    assert done.returncode == 0, done.stderr
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "SHA256SUMS", "pdrelay-0.1.0.tar.gz", "pdrelay-0.1.0.tgz", "pdrelay-0.1.0-py3-none-any.whl",
        "pdrelay-0.1.0-cp312-cp312-linux_x86_64.whl", "pdrelay-0.1.0.oci.tar", "sbom/router.cdx.json",
        "pdrelay_tools-0.1.0.tar.gz", "pdrelay_tools-0.1.0-py3-none-any.whl",
    } <= names  # fmt: skip
    assert (folder / "pdrelay-0.1.0.tgz").read_text() == "1577836800\n"  # helm 4 keeps the times of the files
    assert "check --strict: 8" in done.stdout
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, check=False)
    assert check.returncode == 0
    assert "twine upload" in done.stdout


def test_a_release_that_is_not_the_same_twice_is_refused(pythons, tmp_path):
    """The file that differs is named."""
    Path(pythons[0]).write_text(PYTHON.replace("TH", "12").replace("+SDIST_TIME", "+%N"))
    done = release(tmp_path / "release", pythons, tmp_path)

    assert done.returncode == 1
    assert "pdrelay-0.1.0.tar.gz was built twice, and differs" in done.stderr


def test_the_digests_of_a_release_are_signed_with_ones_key(pythons, tmp_path):
    """With gpg, for those who have no identity that cosign could ask for."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    (home := tmp_path / "keys").mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch"]
    key = [*gpg, "--pinentry-mode", "loopback", "--passphrase", "", "--quick-generate-key", "a test", "ed25519", "sign"]
    subprocess.run([*key, "1d"], check=True, capture_output=True, timeout=60)
    folder = tmp_path / "release"
    done = release(folder, pythons, tmp_path, GNUPGHOME=str(home), GPG_KEY="a test")
    sums = folder / "SHA256SUMS"

    assert (done.returncode, "Not signed" in done.stdout) == (0, False), done.stderr
    verify = [*gpg, "--verify", f"{sums}.asc", str(sums)]
    assert subprocess.run(verify, capture_output=True, check=False, timeout=60).returncode == 0
    sums.write_text(sums.read_text() + "more\n")
    assert subprocess.run(verify, capture_output=True, check=False, timeout=60).returncode == 1
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True, capture_output=True, timeout=60)


def test_a_folder_with_other_files_is_no_place_for_a_release(pythons, tmp_path):
    """They would be signed, too."""
    done = release(tmp_path, pythons, tmp_path)

    assert (done.returncode, "is not empty" in done.stderr) == (2, True)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder with both wheels of this source, as a package index has them."""
    folder = tmp_path_factory.mktemp("index")
    try:
        shutil.copy(compiled_wheel(), folder)
    except NoCompiler as exc:
        pytest.skip(str(exc))
    argv = [IMAGES / "build-wheel.sh", ROOT, folder]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.whl"))) == 2
    return folder


def pip(index, *arguments):
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    argv += ["--quiet", "--no-index", "--find-links", index, "--no-deps", "pdrelay"]
    subprocess.run(argv, check=True, timeout=120)


def kind(python, *paths):
    """Ask an environment which router it has; what the router needs lies in this one."""
    needs = sysconfig.get_path("platlib")
    code = f"import sys; sys.path[:0] = {list(map(str, paths))!r}; sys.path.append({needs!r})\n"
    code += "from pdrelay_proxy.io import build; print(build.find_build().is_compiled, build.__file__)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    compiled, file = done.stdout.split()
    return compiled == "True", Path(file)


@pytest.mark.compiled
@pytest.mark.timeout(900)
def test_pip_installs_the_fast_router_where_it_can(index, tmp_path):
    """By the same name and version, without being asked; another Python gets the pure one."""
    venv.create(tmp_path / "fast", with_pip=False)
    python = tmp_path / "fast/bin/python"
    pip(index, "--python", str(python), "install")
    pip(index, "install", "--python-version", "3.99", "--only-binary=:all:", "--target", str(tmp_path / "pure"))

    is_compiled, file = kind(python)
    assert (is_compiled, file.is_relative_to(tmp_path / "fast")) == (True, True)
    assert not list((tmp_path / "pure").rglob("*.so"))
    assert kind(python, tmp_path / "pure") == (False, tmp_path / "pure/pdrelay_proxy/io/build.py")
