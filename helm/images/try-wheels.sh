#!/bin/sh
# try-wheels.sh FOLDER PYTHON...: install the compiled wheel of each PYTHON into a new environment, as the image does, add
# the tools, and send a request through its router and two simulated engines. PORT (default 18000), PORT + 100 and
# PORT + 200 are theirs.
set -eu
if [ $# -lt 2 ]; then
    echo "try-wheels.sh: give the folder with the wheels, and the Pythons to try them with" >&2
    exit 2
fi
folder=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
port=${PORT:-18000}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

for python in "$@"; do
    tag=$("$python" -c 'import sys; print("cp{}{}".format(*sys.version_info))')
    for wheel in "$folder"/pdrelay-*-"$tag-$tag"-*.whl; do
        [ -f "$wheel" ] || {
            echo "try-wheels.sh: $folder has no compiled wheel for $python ($tag)" >&2
            exit 2
        }
    done
    PYTHON=$python "$here/install-router.sh" "$made/$tag" "$wheel" >/dev/null
    "$python" -m pip --disable-pip-version-check --python "$made/$tag/bin/python" install --quiet --no-deps --no-index \
        "$folder"/pdrelay_tools-*.whl
    version=$("$made/$tag/bin/pdrelay" --version)
    case $version in
    *", compiled)"*) ;;
    *)
        echo "try-wheels.sh: the router of $wheel is not compiled: $version" >&2
        exit 1
        ;;
    esac
    (cd "$made" && "$made/$tag/bin/pdrelay" up --engine sim --once --port "$port" \
        --prefill-port $((port + 100)) --decode-port $((port + 200)) >"$made/$tag.log" 2>&1) || {
        cat "$made/$tag.log" >&2
        echo "try-wheels.sh: no request came through the router of $wheel" >&2
        exit 1
    }
    echo "$(basename "$wheel"): $version, a request came through"
done
