"""Turns CustomResourceDefinitions into the JSON schemas beside this file: ``make.py FILE.yaml...``.

The CRDs are those of the Prometheus operator, KEDA, the Gateway API and LeaderWorkerSet as of August 2026 (all
Apache-2.0). What the schemas are for is the shape alone: descriptions, status and validation expressions are left out.
Pod templates are left open, for they are checked against the schema of a Pod.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KEPT = {"type", "properties", "required", "items", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength"}
KEPT |= {"minItems", "maxItems", "additionalProperties", "format"}
POD_TEMPLATES = {"leaderTemplate", "workerTemplate"}


def schema_of(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the JSON schema of one version; properties that it does not name are refused, as with strict decoding."""
    found = next(one for one in crd["spec"]["versions"] if one["name"] == version)
    kind, group = crd["spec"]["names"]["kind"], crd["spec"]["group"]
    spec = _strict(found["schema"]["openAPIV3Schema"]["properties"]["spec"])
    head = {"apiVersion": {"const": f"{group}/{version}"}, "kind": {"const": kind}, "metadata": {"type": "object"}}
    return {
        "type": "object",
        "properties": head | {"spec": spec},
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    }


def _strict(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in node.items() if key in KEPT}
    if "properties" in kept:
        kept["properties"] = {
            name: {"type": "object"} if name in POD_TEMPLATES else _strict(one)
            for name, one in kept["properties"].items()
        }
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _strict(kept[key])
    return kept


def main(paths: list[str]) -> None:
    for path in paths:
        crd = yaml.safe_load(Path(path).read_text())
        served = [one["name"] for one in crd["spec"]["versions"] if one["storage"]]
        schema = schema_of(crd, served[0])
        name = crd["spec"]["names"]["kind"].lower()
        (HERE / f"{name}.json").write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
