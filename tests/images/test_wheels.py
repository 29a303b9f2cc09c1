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
[ "$2" != hatchling ] || { date +SDIST_TIME >"$7/pdrelay-0.1.0.tar.gz"; exit; }
while [ "$1" != --wheel-dir ]; do shift; done
tag=py3-none-any
[ "${HATCH_BUILD_HOOK_ENABLE_CUSTOM:-}" != true ] || tag=cp3TH-cp3TH-linux_x86_64
echo "$tag" >"$2/pdrelay-0.1.0-$tag.whl"
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
def test_a_release_has_the_pure_wheel_and_one_for_each_python(pythons, tmp_path, audit, tag):
    """And their digests, to be signed."""
    audit = audit if audit == "none" else str(tmp_path / audit)
    done = script(str(tmp_path / "dist"), *pythons, AUDITWHEEL=audit)

    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "dist").iterdir()}
    assert found == {
        "pdrelay-0.1.0-py3-none-any.whl", f"pdrelay-0.1.0-cp312-cp312-{tag}.whl",
        f"pdrelay-0.1.0-cp313-cp313-{tag}.whl",
        "SHA256SUMS",
    }  # fmt: skip
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "dist", capture_output=True, check=False)
    assert check.returncode == 0


def test_a_release_without_a_folder_is_refused():
    """In a sentence."""
    done = script()

    assert (done.returncode, done.stderr) == (2, "wheels.sh: give the folder, and the Pythons to compile for\n")


def release(folder, pythons, tmp_path, **more):
    """Run release.sh with pretended Pythons and helm."""
    helm = tmp_path / "helm"
    helm.write_text('#!/bin/sh\necho chart >"$4/pdrelay-0.1.0.tgz"\n')
    helm.chmod(0o755)
    sbom = tmp_path / "cyclonedx"
    sbom.write_text('#!/bin/sh\nwhile [ "$1" != --output-file ]; do shift; done\ncat >"$2"\n')
    sbom.chmod(0o755)
    more = {"HELM": str(helm), "AUDITWHEEL": "none", "CYCLONEDX": str(sbom), **more}
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
        "pdrelay-0.1.0-cp312-cp312-linux_x86_64.whl", "sbom/router.cdx.json",
    } <= names  # fmt: skip
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, check=False)
    assert check.returncode == 0
    assert "twine upload" in done.stdout


def test_a_release_that_is_not_the_same_twice_is_refused(pythons, tmp_path):
    """The file that differs is named."""
    Path(pythons[0]).write_text(PYTHON.replace("TH", "12").replace("+SDIST_TIME", "+%N"))
    done = release(tmp_path / "release", pythons, tmp_path)

    assert done.returncode == 1
    assert "pdrelay-0.1.0.tar.gz was built twice, and differs" in done.stderr


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
