#!/bin/sh
# install-engine.sh WHEEL: add the connector to an environment that has vLLM, and change nothing else in it.
# PYTHON (default python3) is that environment. A NIXL that is there and new enough stays: the image chose it for its drivers.
set -eu
if [ $# -ne 1 ]; then
    echo "install-engine.sh: give the wheel" >&2
    exit 2
fi
if [ ! -f "$1" ]; then
    echo "install-engine.sh: there is no file $1" >&2
    exit 2
fi
python=${PYTHON:-python3}
# The environment of an image is the system's, and it is meant.
export PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
if "$python" -m pip --version >/dev/null 2>&1; then
    add() { "$python" -m pip --disable-pip-version-check install --quiet --root-user-action ignore --no-deps "$@"; }
else
    add() { uv pip install --quiet --python "$python" --no-deps "$@"; }
fi

nixl=$("$python" -c '
from importlib import metadata
print(next(iter(found.version for found in metadata.distributions(name="nixl")), "none"))')
case $nixl in
none | 0.* | 1.[0-4] | 1.[0-4].*)
    echo "install-engine.sh: NIXL here: $nixl; installing that of requirements-nixl.txt" >&2
    add --only-binary :all: --require-hashes -r "$(dirname "$0")/requirements-nixl.txt"
    ;;
*) echo "install-engine.sh: NIXL $nixl stays" >&2 ;;
esac
add --no-index "$1"
"$python" -c 'import numpy, pdrelay_connector.core.control, pdrelay_connector.settings'
