#!/bin/sh
# wheels.sh FOLDER [PYTHON...]: the wheels of a release: the pure one, a compiled one for each Python (default: python3),
# and that of the tools.
# pip takes the compiled one where it fits. Each PYTHON needs pip, a C compiler, its headers, and what requirements-build.txt
# and requirements-compile.txt name. AUDITWHEEL (default auditwheel) gives the compiled ones the tag of the oldest glibc that
# they run on, without which a package index takes none; `none` leaves the machine's own tag.
set -eu
if [ $# -eq 0 ]; then
    echo "wheels.sh: give the folder, and the Pythons to compile for" >&2
    exit 2
fi
folder=$1
shift
[ $# -gt 0 ] || set -- python3
here=$(dirname "$0")
source=$here/../..
mkdir -p "$folder"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

PYTHON=$1 "$here/build-wheel.sh" "$source" "$folder"
PYTHON=$1 "$here/build-wheel.sh" "$source/tools" "$folder"
for python in "$@"; do
    PYTHON=$python HATCH_BUILD_HOOK_ENABLE_CUSTOM=true "$here/build-wheel.sh" "$source" "$made"
    if [ "${AUDITWHEEL:-auditwheel}" = none ]; then
        mv "$made"/*.whl "$folder"
    else
        "${AUDITWHEEL:-auditwheel}" repair --wheel-dir "$folder" "$made"/*.whl
        rm "$made"/*.whl
    fi
done
(cd "$folder" && sha256sum ./*.whl >SHA256SUMS && cat SHA256SUMS)
