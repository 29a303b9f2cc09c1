#!/bin/sh
# check-base.sh ALLOW IMAGE...: end a build whose base is named by a tag, for a tag is what its registry says today.
# ALLOW is `true` where that is meant (ALLOW_BASE_BY_TAG): for a look, not for an image that serves.
set -eu
if [ $# -lt 2 ]; then
    echo "check-base.sh: say true or false, and give the base images" >&2
    exit 2
fi
allow=$1
shift
for image in "$@"; do
    if [ "$allow" != true ] && ! expr "$image" : '.*@sha256:[0-9a-f]\{64\}$' >/dev/null; then
        echo "check-base.sh: the base image $image has no digest: make images-pin writes it, or say --build-arg ALLOW_BASE_BY_TAG=true" >&2
        exit 1
    fi
done
