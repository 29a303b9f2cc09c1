"""Makes a folder of wheels and tests with which a bare machine checks the connector's core on its
GPU.

It needs pip and a package index here, and Python and torch there. The folder is smaller than 64 MB.
"""

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LARGEST = 64_000_000  # bytes of the folder
PACKAGES = ("nixl", "numpy", "msgspec", "psutil", "cryptography", "cffi", "pycparser")
TEST_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
FILES = ("integration/test_gpu.py", "support/nixl_process.py", "support/transfer_rates.py",
         "support/device_memory.py", "support/engines.py", "support/proc.py")  # fmt: skip
UNUSED = "nixl_ep"  # half of NIXL's wheel: expert parallelism, for three versions of torch
RUN = """#!/bin/sh
# Installs the wheels for this run alone, and checks the connector's core on this machine's GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$here"/*.whl
PYTHONPATH=$site "${PYTHON:-python3}" "$here/tests/integration/test_gpu.py" "$@"
"""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument(
        "--cuda", choices=("12", "13"), default="13", help="major version of torch's CUDA there"
    )
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True)
    names = (*PACKAGES, *TEST_PACKAGES, f"nixl-cu{args.cuda}")
    download([f"{name}=={pinned(name)}" for name in names], args.folder, args.python)
    for wheel in args.folder.glob("nixl_cu*.whl"):
        without(wheel, UNUSED)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(args.folder), str(ROOT))
    copy_tests(args.folder)
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    if size >= LARGEST:
        sys.exit(f"wheels: {args.folder} has {size:,} bytes, and must have less than {LARGEST:,}")
    print(
        f"{args.folder}: {size / 1e6:.1f} MB; on the machine with the GPU: sh "
        f"{args.folder.name}/run.sh"
    )


def pinned(name):
    """Return the version of a package that this project is tested with."""
    for file in ("requirements/engine.txt", "requirements/dev.txt"):
        if found := re.search(rf"(?m)^{re.escape(name)}==([^\s;\\]+)", (ROOT / file).read_text()):
            return found[1]
    sys.exit(f"wheels: {name} is in no requirements file of {ROOT}")


def download(requirements, folder, python):
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]
    pip(
        *(
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={python}",
        ),
        *(*platforms, "--platform=manylinux2014_x86_64", "-d", str(folder), *requirements),
    )


def without(wheel, prefix):
    """Take the folders with this prefix out of a wheel, and their lines out of its list of
    files.
    """
    smaller = wheel.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for entry in old.infolist():
            if entry.filename.startswith(prefix):
                continue
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                kept = [
                    line
                    for line in content.splitlines(keepends=True)
                    if not line.startswith(prefix.encode())
                ]
                content = b"".join(kept)
            new.writestr(entry, content, zipfile.ZIP_DEFLATED)
    smaller.replace(wheel)


def copy_tests(folder):
    for name in FILES:
        target = folder / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, target)
    run = folder / "run.sh"
    run.write_text(RUN)
    run.chmod(0o755)


def pip(*arguments):
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True
    )


if __name__ == "__main__":
    main()
