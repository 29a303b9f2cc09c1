#!/bin/sh
# install-router.sh FOLDER WHEEL [REQUIREMENTS]: make FOLDER a virtual environment with the router and nothing else in it.
# REQUIREMENTS is requirements-router.txt beside this script, or requirements-router-tracing.txt, which adds spans.
# PYTHON (default python3) makes it, and its pip fills it: the environment itself has none. Wheels only: nothing is compiled.
set -eu
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "install-router.sh: give the folder and the wheel, and a requirements file if you like" >&2
    exit 2
fi
folder=$1 wheel=$2
requirements=${3:-$(dirname "$0")/requirements-router.txt}
if [ -e "$folder" ]; then
    echo "install-router.sh: $folder is there already, and must be new" >&2
    exit 2
fi
for file in "$wheel" "$requirements"; do
    if [ ! -f "$file" ]; then
        echo "install-router.sh: there is no file $file" >&2
        exit 2
    fi
done

python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder"
pip() { "$python" -m pip --disable-pip-version-check --python "$folder/bin/python" "$@"; }
pip install --quiet --no-deps --only-binary :all: --require-hashes -r "$requirements"
pip install --quiet --no-deps --no-index "$wheel"
pip check
"$folder/bin/pdrelay" serve --help >/dev/null
