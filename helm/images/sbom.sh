#!/bin/sh
# sbom.sh FOLDER: write what the images and `make install` install, with versions and hashes, as CycloneDX 1.6 in JSON.
# CYCLONEDX (default cyclonedx-py) is the command of cyclonedx-bom. The same files make the same bytes. Nothing is fetched.
# What the base images bring is not in it: their own publishers, or a scanner of images, tell.
set -eu
if [ $# -ne 1 ]; then
    echo "sbom.sh: give the folder" >&2
    exit 2
fi
folder=$1
cd "$(dirname "$0")/../.."
mkdir -p "$folder"
# The library warns that a requirements file does not say what needs what.
export PYTHONWARNINGS=ignore

write() { # write NAME FILE...
    name=$1
    shift
    cat "$@" | "${CYCLONEDX:-cyclonedx-py}" requirements --pyproject pyproject.toml --mc-type application \
        --spec-version 1.6 --output-format JSON --output-reproducible --validate --output-file "$folder/$name.cdx.json" -
}

write router helm/images/requirements-router.txt
write router-tracing helm/images/requirements-router-tracing.txt
write engine helm/images/requirements-nixl.txt
write engine-cpu requirements/torch-cpu.txt requirements/engine.txt
write build helm/images/requirements-build.txt helm/images/requirements-compile.txt
ls "$folder"/*.cdx.json
