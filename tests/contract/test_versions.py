"""Every version of vLLM that is known here has what we use, by recordings of their sources: none is installed."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.vllm_signatures import MEMBERS, ROOT, SHELL, imported, recorded

RECORDINGS = {file.stem: file for file in sorted((ROOT / "tests/versions").glob("*.json"))}
INSTALLED = Path(find_spec("vllm").origin).parent
VERSIONS_FILE = SHELL / "vllm_versions.py"
AGAIN = "python -P tests/support/try_versions.py record [WHEEL]"


@pytest.fixture(params=RECORDINGS)
def known(request):
    return json.loads(RECORDINGS[request.param].read_text())


def functions_of(file, name):
    """Return the methods of a class of ours with their parameters, from its source."""
    (found,) = (node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name)
    return {each.name: [arg.arg for arg in each.args.args] for each in found.body if isinstance(each, ast.FunctionDef)}


OURS = functions_of(SHELL / "connector.py", "PDRelayConnector")
LATER = functions_of(VERSIONS_FILE, "LaterHooks")


def missing_names(known):
    """Return what the connector imports and a version has not."""
    return {
        where for where in imported() if where.split(":")[1] not in known["names"].get(where.split(":")[0], "").split()
    }


def missing_members(known):
    """Return what the connector reads of vLLM's objects and a version's classes have not."""
    return [
        f"{where}.{name}"
        for where, names in MEMBERS.items()
        for name in names
        if name not in known["members"].get(where, "").split()
    ]


def test_the_recording_is_that_of_the_installed_version():
    """A recording that nobody can make again proves nothing."""
    version = re.search(r"version = '(\d+\.\d+)", (INSTALLED / "_version.py").read_text())[1]

    assert version in RECORDINGS, f"vLLM {version} is not known here: {AGAIN}"
    assert recorded(INSTALLED) == json.loads(RECORDINGS[version].read_text()), f"sources have changed: {AGAIN}"


def test_all_names_are_there(known):
    """But for those whose import may fail, all of them in one file."""
    tree = ast.parse(VERSIONS_FILE.read_text())
    optional = {
        f"{node.module}:{each.name}"
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try)
        for node in attempt.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }

    assert missing_names(known) <= optional
    assert missing_members(known) == []


def test_every_hook_of_ours_is_one_of_vllms_with_the_same_parameters(known):
    """vLLM would never call one that it has renamed, in silence; what only some versions call is in one file."""
    ours = {name: args for name, args in OURS.items() if name != "__init__"}

    assert {name: known["hooks"].get(name) for name in ours} == ours
    assert all(known["hooks"].get(name, args) == args for name, args in LATER.items())
    assert set(known["abstract"]) <= set(ours)


def test_the_hooks_come_in_the_order_that_we_count_on(known):
    """Metadata before the forward, loads after it, results before a worker's metadata, news before blocks are freed."""
    assert known["other_orders"] == []


def test_what_multi_connector_asks_of_us_is_there(known):
    """From us, or from vLLM's own base class."""
    asked = set(known["asked_by_multi_connector"]) - {"__class__", "__name__"}

    assert "build_kv_connector_stats" in asked
    assert asked <= {*known["hooks"], *OURS, *LATER}


def test_a_later_hook_is_one_of_some_version():
    """What no version calls any more is to be deleted."""
    called = {name for file in RECORDINGS.values() for name in json.loads(file.read_text())["hooks"]}

    assert set(LATER) <= called
