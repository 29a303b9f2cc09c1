"""Writes what follows from other files: the table in xpyd/README.md, and the settings in xpyd/values.schema.json.

The table comes from the comments "# --" of values.yaml; the settings from the options of the router and of the
connector, so that the chart refuses what they would refuse. After a change of either: ``python helm/generate.py``; with
``--check`` it only says, by its exit code, whether there is something to write.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "proxy"), str(HERE.parent / "connector")]

from xpyd_connector.settings import AT_LEAST, CHOICES, FROM_ENVIRONMENT, SHARES, Settings  # noqa: E402 (found only now)
from xpyd_proxy.options import OPTIONS, Kind  # noqa: E402

CHART = HERE / "xpyd"
BEGIN, END = "<!-- values: made by helm/generate.py -->", "<!-- end of values -->"
# Settings of the router for which the chart has values of its own, or which name files that it mounts.
ROUTER_OWN = {
    "prefill", "decode", "host", "port", "workers", "kubernetes_selector", "kubernetes_namespace", "store",
    "drain_grace_s", "shutdown_timeout_s", "api_keys_file", "prefill_api_key_file", "decode_api_key_file", "tls_cert",
    "tls_key", "tls_client_ca", "allow_unauthenticated", "allowed_hosts", "allowed_instances",
}  # fmt: skip
CONNECTOR_OWN = {"mode", "kv_lease_duration", *FROM_ENVIRONMENT}
Schema = dict[str, Any]
KINDS = {bool: "boolean", str: "string", tuple: ["array", "object"]}  # a setting of the connector, by its default


def readme(text: str, values: str) -> str:
    """Return a README with the table of these values in it."""
    rows = [f"| `{key}` | `{_shown(default)}` | {said} |" for key, default, said in _rows(values)]
    table = "\n".join(["| value | default | |", "|---|---|---|", *rows])
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def _rows(text: str) -> Iterator[tuple[str, object, str]]:
    """Yield what has a comment, in order: key, default, comment."""
    values, path, comment = yaml.safe_load(text), list[str](), ""
    for line in text.splitlines():
        if found := re.match(r" *# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"( *)([A-Za-z]+):", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if comment:
                yield ".".join(path), _at(values, path), comment.replace("|", "\\|")
            comment = ""
    yield from _others(values)


def _others(values: dict[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yield what decode has otherwise than prefill."""
    for key in _paths(values["prefill"], "prefill"):
        other = key.replace("prefill", "decode", 1)
        if (default := _at(values, other.split("."))) != _at(values, key.split(".")):
            yield other, default, f"as `{key}`"


def _paths(values: dict[str, Any], path: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(cast("dict[str, Any]", value), f"{path}.{key}")
        else:
            yield f"{path}.{key}"


def _at(values: dict[str, Any], path: list[str]) -> object:
    found: Any = values
    for key in path:
        found = found[key]
    return found


def _shown(default: object) -> str:
    return json.dumps(default, ensure_ascii=False)


def schema(text: str) -> str:
    """Return a schema of values with the settings of router and connector in it."""
    found: Schema = json.loads(text)
    top = found["properties"]
    top["router"]["properties"]["settings"]["properties"] = {
        option.name: _router(option.kind) for option in OPTIONS if option.name not in ROUTER_OWN
    }
    top["connector"]["properties"]["extraConfig"]["properties"] = {
        field.name: _connector(field) for field in dataclasses.fields(Settings) if field.name not in CONNECTOR_OWN
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _router(kind: Kind) -> Schema:
    """Describe what an option takes, by asking it."""
    if set(kind.choices) == {"true", "false"}:
        return {"type": "boolean"}
    if kind.choices:
        return {"type": "string", "enum": list(kind.choices)}
    if kind.written is str:
        return {"type": "string", "minLength": 1}
    least: Schema = {"minimum": 0} if _takes(kind, "0") else {"exclusiveMinimum": 0}
    if _takes(kind, "-1"):
        least = {}
    most: Schema = {} if _takes(kind, "11") else {"maximum": 10 if _takes(kind, "10") else 1}
    return {"type": "integer" if kind.written is int else "number", **least, **most}


def _takes(kind: Kind, text: str) -> bool:
    try:
        kind.read(text)
    except ValueError:
        return False
    return True


def _connector(field: "dataclasses.Field[Any]") -> Schema:
    if type(field.default) in KINDS:
        return {"type": KINDS[type(field.default)]}
    if field.name in CHOICES:
        return {"type": "string", "enum": [choice.value for choice in CHOICES[field.name]]}
    if field.name in AT_LEAST:
        most: Schema = {"maximum": SHARES[field.name]} if field.name in SHARES else {}
        kind = "integer" if isinstance(field.default, int) else "number"
        return {"type": kind, "minimum": AT_LEAST[field.name], **most}
    return {"type": ["boolean", "null"]}


def made() -> Mapping[Path, str]:
    """Return what the files should say."""
    page, shape = CHART / "README.md", CHART / "values.schema.json"
    return {
        page: readme(page.read_text(), (CHART / "values.yaml").read_text()),
        shape: schema(shape.read_text()),
    }


def main(arguments: list[str]) -> int:
    """Write them, or say that they are old."""
    old = [path for path, text in made().items() if path.read_text() != text]
    for path in old:
        if "--check" not in arguments:
            path.write_text(made()[path])
        sys.stdout.write(f"{path.relative_to(HERE.parent)} is {'old' if '--check' in arguments else 'written anew'}\n")
    return int("--check" in arguments and bool(old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
