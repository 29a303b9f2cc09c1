#!/bin/sh
# sign.sh IMAGE@sha256:DIGEST...: sign images that are in their registry, and attach the bill of materials to each.
# COSIGN (default cosign) signs with the identity of who is logged in (Sigstore), or with KEY, a key of cosign's.
# SBOM is the folder that `make sbom` writes, dist/sbom by default.
set -eu
if [ $# -eq 0 ]; then
    echo "sign.sh: give the images, each with its digest" >&2
    exit 2
fi
sbom=${SBOM:-$(dirname "$0")/../../dist/sbom}
for image in "$@"; do
    if ! expr "$image" : '.*@sha256:[0-9a-f]\{64\}$' >/dev/null; then
        echo "sign.sh: $image has no digest: a tag may be another image when it is signed" >&2
        exit 2
    fi
    name=${image%@*}
    name=${name##*/}
    name=${name%%:*}
    if [ ! -f "$sbom/$name.cdx.json" ]; then
        echo "sign.sh: there is no $sbom/$name.cdx.json: make sbom writes it" >&2
        exit 2
    fi
    "${COSIGN:-cosign}" sign --yes ${KEY:+--key "$KEY"} "$image"
    "${COSIGN:-cosign}" attest --yes ${KEY:+--key "$KEY"} --type cyclonedx --predicate "$sbom/$name.cdx.json" "$image"
done
