#!/bin/sh
# release.sh FOLDER [PYTHON...]: all files of a release, up to where an upload would begin. Nothing is uploaded.
# The sdist, the pure wheel, a compiled one for each PYTHON (default: python3), sdist and wheel of the tools, the chart's
# package and its OCI archive are built twice, and must be equal byte for byte. Beside them: the bills of materials,
# SHA256SUMS, and its signatures: with GPG_KEY by that key of gpg, and by cosign where it is installed, with KEY or as who
# is logged in.
# HELM (default helm) packs the chart; TWINE (default twine) looks at what an index would show; AUDITWHEEL and CYCLONEDX as
# in wheels.sh and sbom.sh.
set -eu
if [ $# -eq 0 ]; then
    echo "release.sh: give the folder, and the Pythons to compile for" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
if [ -n "$(ls -A "$folder")" ]; then
    echo "release.sh: $folder is not empty, and what lies there would be signed, too" >&2
    exit 2
fi
[ $# -gt 0 ] || set -- python3
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
again=$(mktemp -d)
copied=$(mktemp -d)
chart=$copied/pdrelay
trap 'rm -rf "$again" "$copied"' EXIT
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}"

for place in "$folder" "$again"; do
    "$here/wheels.sh" "$place" "$@" >/dev/null
    for project in "$source" "$source/tools"; do
        (cd "$project" && "$1" -m hatchling build --target sdist --directory "$place" >/dev/null)
    done
    rm "$place/SHA256SUMS"
    # helm notes the times of the files.
    rm -rf "$chart"
    cp -R "$source/helm/pdrelay" "$chart"
    find "$chart" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
    "${HELM:-helm}" package "$chart" --destination "$place" >/dev/null
    for package in "$place"/*.tgz; do
        "$1" -P "$source/tests/support/chart_archive.py" "${HELM:-helm}" "$package" "${package%.tgz}.oci.tar"
    done
done
"${TWINE:-twine}" check --strict "$folder"/*.whl "$folder"/*.tar.gz
for file in "$folder"/*; do
    cmp "$file" "$again/$(basename "$file")" || {
        echo "release.sh: $(basename "$file") was built twice, and differs" >&2
        exit 1
    }
done

"$here/sbom.sh" "$folder/sbom" >/dev/null
cd "$folder"
find . -type f ! -name SHA256SUMS | sort | xargs sha256sum >SHA256SUMS
cat SHA256SUMS
if [ -n "${GPG_KEY:-}" ]; then
    gpg --batch --local-user "$GPG_KEY" --armor --detach-sign SHA256SUMS
fi
if command -v cosign >/dev/null; then
    cosign sign-blob --yes ${KEY:+--key "$KEY"} --bundle SHA256SUMS.sigstore.json SHA256SUMS
elif [ -z "${GPG_KEY:-}" ]; then
    echo "Not signed: cosign is not installed, and GPG_KEY names no key of gpg."
fi
echo "To publish: twine upload $folder/*.whl $folder/*.tar.gz; helm push $folder/*.tgz oci://REGISTRY/charts"
