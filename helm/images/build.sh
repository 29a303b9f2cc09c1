#!/bin/sh
# build.sh [TAG]: build both images from the bases of bases.lock, which pin-bases.sh writes. BASES names another file.
# DOCKER (default docker) builds them; the names begin with REPOSITORY (default localhost/pdrelay). REVISION is the commit that
# they are labelled with, and which pdrelay --version shows; by default the one that is checked out, where there is git.
set -eu
here=$(dirname "$0")
bases=${BASES:-$here/bases.lock}
tag=${1:-0.1.0}
if [ ! -f "$bases" ]; then
    echo "build.sh: there is no $bases: make images-pin writes it" >&2
    exit 2
fi
arguments=$(sed -n 's/^\([A-Z]*_IMAGE=[^ ]*\)$/--build-arg \1/p' "$bases")
revision=${REVISION:-$(git -C "$here" rev-parse HEAD 2>/dev/null || echo unknown)}
for image in router engine; do
    # shellcheck disable=SC2086 # words are meant: a reference has no spaces
    "${DOCKER:-docker}" build -f "$here/$image.Dockerfile" $arguments --build-arg "REVISION=$revision" \
        --label "org.opencontainers.image.version=$tag" --label "org.opencontainers.image.revision=$revision" \
        -t "${REPOSITORY:-localhost/pdrelay}/$image:$tag" "$here/../.."
done
