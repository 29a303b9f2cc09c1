#!/bin/sh
# Write the requirements-*.txt of the images anew. Needs uv; versions are those that the tests run with.
set -eu
cd "$(dirname "$0")"
export UV_CUSTOM_COMPILE_COMMAND=helm/images/lock.sh

lock() { # lock FILE ARGUMENT...
    file=$1
    shift
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate \
        -c ../../requirements/engine.txt -c ../../requirements/dev.txt -o "$file" "$@"
}

lock requirements-router.txt --extra proxy ../../pyproject.toml
lock requirements-router-tracing.txt --extra proxy --extra tracing ../../pyproject.toml
echo 'hatchling>=1.27' | lock requirements-build.txt -
printf 'mypy[mypyc]>=2.0\nhttptools>=0.9\nmsgspec>=0.19\n' | lock requirements-compile.txt - # what pyproject.toml asks for to compile the router
printf 'auditwheel>=6.8\npatchelf>=0.19\ntwine>=7\n' | lock requirements-release.txt -
printf 'nixl>=1.5\nnixl-cu12\nnixl-cu13\n' | lock requirements-nixl.txt --no-deps -
