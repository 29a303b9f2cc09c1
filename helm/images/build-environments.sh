#!/bin/sh
# build-environments.sh FOLDER [PYTHON...]: make the environments that a release is built in, and print their interpreters:
# FOLDER/3.12 and the like for each PYTHON, and FOLDER/tools with auditwheel and twine, which is not printed.
# Default: each CPython from 3.11 to 3.14 that the PATH or pyenv has, with its headers. What is there and locked stays.
set -eu
if [ $# -eq 0 ]; then
    echo "build-environments.sh: give the folder, and the Pythons to compile for" >&2
    exit 2
fi
folder=$1
shift
here=$(cd "$(dirname "$0")" && pwd)

compiles() { # compiles PYTHON: whether a wheel can be compiled for it
    "$1" -c '
import pathlib, sys, sysconfig
supported = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 14)
sys.exit(not supported or not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())' 2>/dev/null
}

if [ $# -eq 0 ]; then
    for version in 3.11 3.12 3.13 3.14; do
        for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
            if compiles "$python"; then
                set -- "$@" "$python"
                break
            fi
        done
    done
fi
if [ $# -eq 0 ]; then
    echo "build-environments.sh: no CPython from 3.11 to 3.14 with headers is here: install one, or name it" >&2
    exit 2
fi

environment() { # environment FOLDER PYTHON FILE...: an environment with what these files lock
    place=$1 python=$2
    shift 2
    cat "$@" | cmp -s - "$place/locked.txt" && return
    rm -rf "$place"
    "$python" -m venv "$place"
    for file in "$@"; do
        "$place/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: --require-hashes -r "$file"
    done
    cat "$@" >"$place/locked.txt"
}

for python in "$@"; do
    if ! compiles "$python"; then
        echo "build-environments.sh: $python is no CPython from 3.11 to 3.14 with its headers" >&2
        exit 2
    fi
done

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
environment "$folder/tools" "$1" "$here/requirements-release.txt"
for python in "$@"; do
    place=$folder/$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
    environment "$place" "$python" "$here/requirements-build.txt" "$here/requirements-compile.txt"
    echo "$place/bin/python"
done
