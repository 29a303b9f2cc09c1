#!/bin/sh
# build-wheel.sh SOURCE FOLDER: build the wheel of pdrelay out of a checkout, or of pdrelay-tools out of its folder tools/.
# PYTHON (default python3) needs pip and hatchling: requirements-build.txt. Nothing is fetched here.
set -eu
if [ $# -ne 2 ]; then
    echo "build-wheel.sh: give the checkout and the folder for the wheel" >&2
    exit 2
fi
if [ ! -f "$1/pyproject.toml" ]; then
    echo "build-wheel.sh: $1 is not a checkout: it has no pyproject.toml" >&2
    exit 2
fi
# The same source makes the same wheel, byte for byte.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}"
exec "${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet \
    --no-deps --no-index --no-build-isolation --wheel-dir "$2" "$1"
