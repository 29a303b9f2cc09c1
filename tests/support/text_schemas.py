"""The requests and answers of the two text endpoints, for /openapi.json: made from vLLM's own protocol classes.

``python -P tests/support/text_schemas.py`` writes them to a file of the router, which has no vLLM where it runs. Fields
that only later versions have, by their recordings in tests/versions, are named there without a type.
"""

import json
import re
import sys
import warnings
from pathlib import Path

from pydantic.json_schema import models_json_schema

ROOT = Path(__file__).parents[2]
FILE = ROOT / "proxy/pdrelay_proxy/api/text_schemas.json"
AGAIN = "python -P tests/support/text_schemas.py"
PLACE = "#/components/schemas/"
REQUESTS = {"CompletionRequest": "/v1/completions", "ChatCompletionRequest": "/v1/chat/completions"}
LEFT_OUT = {
    "kv_transfer_params": "the router refuses it, and answers never have it",
    "ec_transfer_params": "the same",
    "request_id": "the router names requests itself: X-Request-Id",
    "chat_template": "the router refuses it unless trust_request_chat_template is set",
}
# A class of openai_harmony; the router's document has another Message, and a message of any role is typed without it.
NO_VARIANT = "Message"
_HEAD = ("id", "object", "created", "model", "choices")
# Fields that every answer has; vLLM's classes have defaults for them.
ALWAYS = {
    "CompletionResponse": _HEAD,
    "CompletionStreamResponse": _HEAD,
    "ChatCompletionResponse": _HEAD,
    "ChatCompletionStreamResponse": _HEAD,
    "UsageInfo": ("prompt_tokens", "total_tokens"),
}
NOTES = {
    "cache_salt": "Where clients have keys, the router sets it, by the key and by what is written here.",
    "chat_template_kwargs": "The router refuses chat_template in it, unless trust_request_chat_template is set.",
    "model": "May be left out where all engines serve one model.",
    "priority": "The header X-vLLM-Priority counts before it.",
    "tool_choice": "Without it: auto if there are tools, else none.",
    "vllm_xargs": "The router refuses kv_transfer_params and ec_transfer_params in it.",
}
_OTHERWISE = ("title", "default", "properties")
THEIRS = "openai__"  # begins the long name of a class of openai if one of vLLM has the same short name


def classes():
    """Return vLLM's classes of requests and answers; importing vLLM warns about things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion import protocol as chat
        from vllm.entrypoints.openai.completion import protocol as completion
    return [
        completion.CompletionRequest,
        completion.CompletionResponse,
        completion.CompletionStreamResponse,
        chat.ChatCompletionRequest,
        chat.ChatCompletionResponse,
        chat.ChatCompletionStreamResponse,
    ]


def installed_version():
    """Return the version of vLLM that is installed, as 0.32."""
    from vllm.version import __version__

    return re.match(r"\d+\.\d+", __version__)[0]


def made():
    """Return what the file should say."""
    models = classes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, found = models_json_schema([(model, "validation") for model in models], ref_template=PLACE + "{model}")
    names = {name: short_name(name) for name in found["$defs"]}
    assert len({*names.values()}) == len(names), f"two classes get one name: {names}"
    version = installed_version()
    schemas = {names[name]: written(schema, names) for name, schema in found["$defs"].items()}
    for name, path in REQUESTS.items():
        describe_request(schemas[name]["properties"], found["$defs"][name]["properties"])
        schemas[name]["properties"] |= fields_of_later_versions(path, version, schemas[name]["properties"])
    for name, always in ALWAYS.items():
        needed = {*always, *schemas[name].get("required", ())}
        schemas[name]["required"] = [field for field in schemas[name]["properties"] if field in needed]
    kept = reached(schemas, [model.__name__ for model in models])
    return {"vllm": version, "schemas": {name: schemas[name] for name in sorted(kept)}}


def short_name(name):
    """Return the name of a class in the document: its own, and of two with one name vLLM's keeps it."""
    last = name.rpartition("__")[2]
    return f"{last}Param" if name.startswith(THEIRS) else last


def written(schema, names):
    """Return a schema without titles, and without defaults: a generated client would send each of them."""
    if isinstance(schema, list):
        variants = [written(each, names) for each in schema]
        return [each for each in variants if each != {"$ref": PLACE + NO_VARIANT}]
    if not isinstance(schema, dict):
        return schema
    kept = {name: written(value, names) for name, value in schema.items() if name not in _OTHERWISE}
    if "$ref" in kept:
        kept["$ref"] = PLACE + names[kept["$ref"].removeprefix(PLACE)]
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if kept.get("format") == "binary":  # bytes in JSON; a generated client would send a file
        del kept["format"]
        kept["contentEncoding"] = "base64"
    if "properties" in schema:
        kept["properties"] = {
            name: written(each, names)
            for name, each in schema["properties"].items()
            if name not in LEFT_OUT and not name.startswith("_")
        }
    return kept


def describe_request(fields, original):
    """Say what vLLM takes for a field that is left out, and what the router makes of some."""
    for name, schema in fields.items():
        default = original[name].get("default")
        is_plain = default not in (None, [], {}) and name not in NOTES
        said = f"Default: {json.dumps(default)}." if is_plain else ""
        about = " ".join(filter(None, (schema.get("description", ""), said, NOTES.get(name, ""))))
        if about:
            schema["description"] = about


def fields_of_later_versions(path, version, known):
    """Return schemas of the fields of later versions, from the first that has each."""
    found = {}
    recordings = {as_numbers(file.stem): file for file in (ROOT / "tests/versions").glob("*.json")}
    for later in sorted(number for number in recordings if number > as_numbers(version)):
        file = recordings[later]
        for name in json.loads(file.read_text())["bodies"][path]:
            if name not in known and name not in LEFT_OUT:
                found.setdefault(name, {"description": f"From vLLM {file.stem}."})
    return found


def as_numbers(version):
    """Return a version so that later ones are larger."""
    return tuple(map(int, version.split(".")))


def reached(schemas, roots):
    """Return the names of these schemas and of all that they refer to."""
    found = set()
    waiting = [*roots]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += re.findall(rf'"{PLACE}(\w+)"', json.dumps(schemas[name]))
    return found


def differences(old, new):
    """Return a line for each field, and each class, that is in one of two files or has another type in them."""
    before = old["schemas"]
    after = new["schemas"]
    lines = [f"{name} is new" for name in sorted(after.keys() - before.keys())]
    lines += [f"{name} is gone" for name in sorted(before.keys() - after.keys())]
    for name in sorted(before.keys() & after.keys()):
        fields = before[name].get("properties", {})
        now = after[name].get("properties", {})
        lines += [f"{name}.{field} is new" for field in now.keys() - fields.keys()]
        lines += [f"{name}.{field} is gone" for field in fields.keys() - now.keys()]
        lines += [f"{name}.{field} has changed" for field in fields.keys() & now.keys() if fields[field] != now[field]]
        rest, now_rest = ({**each, "properties": None} for each in (before[name], after[name]))
        if rest != now_rest:
            lines.append(f"{name} has changed")
    return lines


def main():
    """Write the file, and say what has changed."""
    new = made()
    for line in differences(json.loads(FILE.read_text()), new) if FILE.exists() else ():
        print(line)
    FILE.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
