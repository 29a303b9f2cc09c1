#!/bin/sh
# pin-bases.sh [FILE]: ask the registries which digests the Dockerfiles' base images have, and write them into FILE, for build.sh.
# FILE is bases.lock beside this script. Look at what has changed before you build from it. DOCKER (default docker) has buildx.
set -eu
here=$(dirname "$0")
file=${1:-$here/bases.lock}
part=$file.part
trap 'rm -f "$part"' EXIT
: >"$part"
sed -n 's/^ARG \([A-Z]*_IMAGE\)=\(.*\)$/\1 \2/p' "$here"/*.Dockerfile | sort -u | while read -r name image; do
    digest=$("${DOCKER:-docker}" buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
    if ! expr "$digest" : 'sha256:[0-9a-f]\{64\}$' >/dev/null; then
        echo "pin-bases.sh: the registry said '$digest' for $image, which is no digest" >&2
        exit 1
    fi
    echo "$name=$image@$digest" >>"$part"
done
mv "$part" "$file"
cat "$file"
