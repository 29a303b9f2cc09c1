"""The chart as an OCI archive: an image layout in a tar file, which skopeo and others copy into any registry.

``chart_archive.py HELM CHART.tgz ARCHIVE.tar`` has helm push the package to a registry on loopback, so that manifest
and configuration are helm's own, and writes down what came there. One package, with one SOURCE_DATE_EPOCH, always makes
the same bytes.
"""

import datetime
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# As a script it has its own folder on the path, or none.
sys.path.insert(0, str(Path(__file__).parents[1]))
from support.oci_registry import oci_registry

CREATED = "org.opencontainers.image.created"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def main(helm, package, archive):
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "1577836800"))
    with oci_registry() as (host, registry), tempfile.TemporaryDirectory() as home:
        argv = [helm, "push", package, f"oci://{host}/charts", "--plain-http"]
        subprocess.run(argv, env=os.environ | {"HELM_CACHE_HOME": home}, check=True, capture_output=True)
        blobs = dict(registry.blobs)
        tag, manifest = next((tag, body) for (_, tag), (_, body) in registry.manifests.items() if ":" not in tag)
    Path(archive).write_bytes(layout(blobs, dated(manifest, epoch), tag, epoch))


def dated(manifest, epoch):
    """Return a manifest that was made at this time: helm notes when it pushed."""
    whole = json.loads(manifest)
    whole["annotations"][CREATED] = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(whole).encode()


def layout(blobs, manifest, tag, epoch):
    """Return an image layout of one manifest as a tar file (github.com/opencontainers/image-spec, image-layout.md)."""
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    named = {"mediaType": MANIFEST, "digest": digest, "size": len(manifest)}
    named["annotations"] = {"org.opencontainers.image.ref.name": tag}
    files = {f"blobs/{name.replace(':', '/')}": body for name, body in (blobs | {digest: manifest}).items()}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    files["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            member.mtime = epoch
            tar.addfile(member, io.BytesIO(files[name]))
    return made.getvalue()


if __name__ == "__main__":
    main(*sys.argv[1:])
