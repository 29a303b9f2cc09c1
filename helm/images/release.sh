#!/bin/sh
# release.sh FOLDER [PYTHON...]: all files of a release, up to where an upload would begin. Nothing is uploaded.
# The sdist, the pure wheel and a compiled one for each PYTHON (default: python3) are built twice, and must be equal byte
# for byte. Beside them: the chart as an archive, the bills of materials, SHA256SUMS, and its signature where cosign is.
# HELM (default helm) packs the chart; AUDITWHEEL, CYCLONEDX and PYTHON as in wheels.sh and sbom.sh; KEY is cosign's.
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
trap 'rm -rf "$again"' EXIT
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}"

for place in "$folder" "$again"; do
    "$here/wheels.sh" "$place" "$@" >/dev/null
    (cd "$source" && "$1" -m hatchling build --target sdist --directory "$place" >/dev/null)
    rm "$place/SHA256SUMS"
done
for file in "$folder"/*; do
    cmp "$file" "$again/$(basename "$file")" || {
        echo "release.sh: $(basename "$file") was built twice, and differs" >&2
        exit 1
    }
done

"${HELM:-helm}" package "$source/helm/pdrelay" --destination "$folder" >/dev/null
"$here/sbom.sh" "$folder/sbom" >/dev/null
cd "$folder"
find . -type f ! -name SHA256SUMS | sort | xargs sha256sum >SHA256SUMS
cat SHA256SUMS
if command -v cosign >/dev/null; then
    cosign sign-blob --yes ${KEY:+--key "$KEY"} --bundle SHA256SUMS.sigstore.json SHA256SUMS
else
    echo "Not signed: cosign is not installed."
fi
echo "To publish: twine upload $folder/*.whl $folder/*.tar.gz; helm push $folder/*.tgz oci://REGISTRY/charts"
