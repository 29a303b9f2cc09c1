"""Writes what follows from other files: tables in pdrelay/README.md and docs/options.md,
pdrelay/values.schema.json, pdrelay/files/empty.json.

The chart's table comes from the comments "# --" of values.yaml; options and the settings in the
schema come from the declarations of the router and of the connector, so the chart refuses what they
would refuse. After a change of either: ``python helm/generate.py``; with ``--check`` it only says,
by its exit code, whether there is something to write.
"""

import dataclasses
import functools
import itertools
import json
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "proxy"), str(HERE.parent / "connector")]

from pdrelay_connector.settings import (  # noqa: E402 (found only now)
    AT_LEAST,
    AUTO,
    AUTOMATIC,
    BOUNDS,
    CHOICES,
    FROM_ENVIRONMENT,
    Settings,
)
from pdrelay_proxy.declarations import ENDLESS, Kind  # noqa: E402
from pdrelay_proxy.known_settings import DECLARED, OPTIONS, Setting  # noqa: E402

CHART = HERE / "pdrelay"
EMPTY = CHART / "files/empty.json"
OPTIONS_PAGE = HERE.parent / "docs/options.md"
VALUES_TABLE = "<!-- values: made by helm/generate.py -->", "<!-- end of values -->"
OPTIONS_TABLES = "<!-- options: made by helm/generate.py -->", "<!-- end of options -->"
CONNECTOR_OWN = {"mode", "kv_lease_duration", *FROM_ENVIRONMENT}
Schema = dict[str, Any]
# a setting of the connector, by its default
KINDS = {bool: "boolean", str: "string", tuple: ["array", "object"]}


def readme(text: str, values: str) -> str:
    """Return a README with the table of these values in it."""
    rows = [
        f"| `{key}` | `{json.dumps(default, ensure_ascii=False)}` | {said} |"
        for key, default, said in _rows(values)
    ]
    return _between(text, VALUES_TABLE, ["| value | default | |", "|---|---|---|", *rows])


def options(text: str) -> str:
    """Return a page with the tables of the router's options in it."""
    lines: list[str] = []
    for group, settings in itertools.groupby(DECLARED, lambda one: one.option.group):
        lines += ["", f"## {group.title[0].upper()}{group.title[1:]}", ""]
        lines += [
            "| flag | key | default | SIGHUP | chart | |",
            "|---|---|---|---|---|---|",
            *map(_option, settings),
        ]
    return _between(text, OPTIONS_TABLES, [*lines, ""])


def _option(setting: Setting) -> str:
    option, name = setting.option, setting.name
    where = (
        [f"`{setting.flag}`", f"`{name}`"]
        if not option.environment
        else [f"`{option.environment}`", "environment"]
    )
    default = option.unset if setting.default in (None, ()) else f"`{setting.default_text}`"
    chart = f"`{option.chart or f'router.settings.{name}'}`"
    choices = (
        f": {', '.join(f'`{one}`' for one in setting.kind.choices)}"
        if setting.kind.value_type is not bool and setting.kind.choices
        else ""
    )
    return f"| {' | '.join([*where, default, 'yes' if option.live else '', chart, option.help + choices])} |"


def _between(text: str, marks: tuple[str, str], lines: list[str]) -> str:
    begin, end = marks
    before, _, rest = text.partition(begin)
    return "\n".join([before + begin, *lines, end]) + rest.partition(end)[2]


def _rows(text: str) -> Iterator[tuple[str, object, str]]:
    """Yield what has a comment, in order: key, default, comment."""
    values = yaml.safe_load(text)
    path = list[str]()
    comment = ""
    for line in text.splitlines():
        if found := re.match(r" *# -- (.*)", line):
            comment = found[1]
        elif found := re.match(r"( *)([A-Za-z]+):", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if comment:
                yield ".".join(path), _at(values, path), comment.replace("|", "\\|")
            comment = ""
    for key in _paths(values["prefill"], "prefill"):  # what decode has otherwise
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
    return functools.reduce(operator.getitem, path, cast("Any", values))


def schema(text: str) -> str:
    """Return a schema of values with the settings of router and connector in it."""
    found: Schema = json.loads(text)
    top = found["properties"]
    top["engine"] = _without(
        found["definitions"]["pool"], cast("dict[str, Any]", _values()["prefill"])
    )
    top["router"]["properties"]["settings"]["properties"] = {
        name: _list(_router(setting.kind)) if setting.is_list else _router(setting.kind)
        for name, setting in OPTIONS.items()
        if not setting.option.chart
    }
    top["connector"]["properties"]["extraConfig"]["properties"] = {
        field.name: _connector(field)
        for field in dataclasses.fields(Settings)
        if field.name not in CONNECTOR_OWN
    }
    found["definitions"]["needed"] = _needed(found, _values(), found["definitions"])
    found["allOf"] = [{"$ref": "#/definitions/needed"}]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def empty(text: str) -> dict[str, Any]:
    """Return the values that may be empty, by a schema."""
    found: Schema = json.loads(text)
    return _empty(found, _values(), found["definitions"])


def _needed(shape: Schema, values: Mapping[str, Any], definitions: Schema) -> Schema:
    """Describe what no rendering can do without. Helm takes a default away for which somebody
    writes null; what may be empty is empty then.
    """
    closed = _closed(shape, values, definitions)
    names = [
        key
        for key, value in values.items()
        if key in closed or _empty_one(value, shape["properties"][key]) is None
    ]
    inner = {key: _needed(kind, values[key], definitions) for key, kind in closed.items()}
    return {"required": [key for key in names if values[key] is not None], "properties": inner}


def _empty(shape: Schema, values: Mapping[str, Any], definitions: Schema) -> dict[str, Any]:
    """Return what stands for null: the values that may be empty, and they are."""
    closed = _closed(shape, values, definitions)
    found = {
        key: _empty(closed[key], value, definitions)
        if key in closed
        else _empty_one(value, shape["properties"][key])
        for key, value in values.items()
    }
    return {
        key: value
        for key, value in found.items()
        if value is not None and (value or key not in closed)
    }


def _empty_one(value: object, kind: Schema) -> object:
    """Return a list, map or text without anything in it; None: nothing can stand for this value."""
    if isinstance(value, list | dict) and not kind.get("minItems"):
        return type(value)()
    return "" if value == "" else None


def _closed(shape: Schema, values: Mapping[str, Any], definitions: Schema) -> Schema:
    """Return the objects among the values whose keys the chart knows, and what they look like."""
    kinds = {
        key: shape["properties"][key]
        for key, value in values.items()
        if isinstance(value, dict) and value
    }
    kinds = {
        key: definitions[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind
        for key, kind in kinds.items()
    }
    free = definitions["resources"]  # Kubernetes' own, of which anything may go
    return {
        key: kind
        for key, kind in kinds.items()
        if kind.get("additionalProperties") is False and kind != free
    }


def _values() -> dict[str, Any]:
    return cast("dict[str, Any]", yaml.safe_load((CHART / "values.yaml").read_text()))


def _without(shape: Schema, own: Mapping[str, Any]) -> Schema:
    """Describe the values of both pools: those of a pool, less what each has a default of its own
    for.
    """
    left = {
        key: _without(kind, own[key]) if isinstance(own.get(key), dict) else kind
        for key, kind in shape["properties"].items()
        if key not in own or isinstance(own[key], dict)
    }
    return {**shape, "properties": left}


def _list(of: Schema) -> Schema:
    """Describe an option of several values, or the one that it has."""
    return {**of, "type": [of["type"], "array"], "minItems": 1, "items": of}


def _router(kind: Kind) -> Schema:
    """Describe what an option takes."""
    if kind.value_type is bool:
        return {"type": "boolean"}
    if kind.choices and not kind.is_open:
        return {"type": "string", "enum": list(kind.choices)}
    if kind.is_open:
        return {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
    if kind.value_type is str:
        return {"type": "string", "minLength": 1}
    bounds = {"minimum": kind.least, "exclusiveMinimum": kind.above, "maximum": kind.most}
    known = {
        name: bound for name, bound in bounds.items() if bound is not None and abs(bound) != ENDLESS
    }
    return {"type": "integer" if kind.value_type is int else "number", **known}


def _connector(field: "dataclasses.Field[Any]") -> Schema:
    if field.name in AUTOMATIC:
        return {"enum": [True, False, AUTO]}
    if type(field.default) in KINDS:
        return {"type": KINDS[type(field.default)]}
    if field.name in CHOICES:
        return {"type": "string", "enum": [choice.value for choice in CHOICES[field.name]]}
    if field.name in AT_LEAST:
        most: Schema = {"maximum": BOUNDS[field.name]} if field.name in BOUNDS else {}
        kind = "integer" if isinstance(field.default, int) else "number"
        return {"type": kind, "minimum": AT_LEAST[field.name], **most}
    return {"type": ["boolean", "null"]}


def made() -> Mapping[Path, str]:
    """Return what the files should say."""
    page, shape = CHART / "README.md", CHART / "values.schema.json"
    return {
        page: readme(page.read_text(), (CHART / "values.yaml").read_text()),
        shape: schema(shape.read_text()),
        EMPTY: json.dumps(empty(shape.read_text()), indent=1) + "\n",
        OPTIONS_PAGE: options(OPTIONS_PAGE.read_text()),
    }


def main(arguments: list[str]) -> int:
    """Write them, or say that they are old."""
    old = [path for path, text in made().items() if path.read_text() != text]
    for path in old:
        if "--check" not in arguments:
            path.write_text(made()[path])
        sys.stdout.write(
            f"{path.relative_to(HERE.parent)} is "
            f"{'old' if '--check' in arguments else 'written anew'}\n"
        )
    return int("--check" in arguments and bool(old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
