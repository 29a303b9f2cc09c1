"""A feature is a folder and a line: one is added as the page says, and each is removed in turn."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import pdrelay_proxy
from pdrelay_proxy.features import FEATURES

pytestmark = pytest.mark.processes

PACKAGE = Path(pdrelay_proxy.__file__).parent
TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs/features.md"
# A little of everything: engines that join and leave, settings that change, what becomes of requests.
SOME = ("api/test_admin.py", "api/test_instances.py", "requests/test_request.py", "test_app.py", "test_live.py")
ALL = [file for file in sorted(TESTS.rglob("test_*.py")) if file != Path(__file__)]
# Tests of these need the whole product: a tool may use a feature, and pages tell of all of them.
WHOLE = ("pdrelay_tools.planning", "support.documents")
EXAMPLE = """
import asyncio
from pdrelay_proxy.cli import main as cli
from pdrelay_proxy.features import features
from pdrelay_proxy.features.slow_requests.settings import SlowSettings
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

async def main():
    async with router(sims(), Settings().with_features(SlowSettings(1e-9))) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        print((await client.get("/metrics")).text)
        print((await client.get("/stats")).json()["features"])
        print(answer.headers["x-request-id"])

asyncio.run(main())
cli(["serve", "--help"])
"""
WITHOUT_FOUR = ("prompt_arrays", "moving_streams", "stores", "peers")
WITHOUT = """
import asyncio
import json
from pdrelay_proxy import supervisor
from pdrelay_proxy.consistency import check
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

async def array():
    engines = sims()
    async with router(engines) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
        mode = answer.headers["server-timing"].partition(", prefill")[0].partition(", decode")[0]
        return [mode, len(answer.json()["choices"]), *[len(engine.log) for engine in engines.values()]]

async def drain():
    engines = sims(1, 2, token_s=0.05, kv_both=True)
    settings = Settings(resume_streams=True, admin_key="sesame")
    async with router(engines, settings) as client:
        asked = {"prompt": "a", "max_tokens": 30, "temperature": 0, "stream": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=asked))
        while not (serving := [name for name in ("d0", "d1") if engines[name].log]):
            await asyncio.sleep(0.01)
        order = {"id": f"decode-{serving[0][1]}", "move": True}
        drained = await client.post("/instances/drain", json=order, headers={"x-api-key": "sesame"})
        last = (await answer).text.split()[-1]
        served = sum(engines[name].log != [] for name in ("d0", "d1"))
        return [drained.status_code, last, served, drained.json().get("detail")]

async def add():
    found = []
    async with router(sims(1, 2), Settings(admin_key="sesame")) as client:
        for path in ("remove", "add"):
            order = {"type": "decode", "instance": "d1:80"}
            changed = await client.post(f"/instances/{path}", json=order, headers={"x-api-key": "sesame"})
            listed = await client.get("/instances", headers={"x-api-key": "sesame"})
            found.append([path, changed.status_code, len(listed.json()["instances"])])
    return found

def refusal(do, *arguments):
    try:
        do(*arguments)
    except ConfigError as error:
        return str(error)

print(json.dumps({
    "array": asyncio.run(array()),
    "drain": asyncio.run(drain()),
    "add": asyncio.run(add()),
    "workers": refusal(check, Settings(workers=2, admin_port=9000)),
    "start": refusal(supervisor.run, Settings(port=0, workers=2, admin_port=0), lambda place: 0),
}))
"""
REPLAYS = """
import sys
from pdrelay_proxy.cli import main

for more in ("", "--kv-events", "--roles auto --ttft 1 --itl 1", "--policy prefix:20ms"):
    code = main(["replay", "--sessions", "2", "--turns", "1", *more.split()])
    print("exit", code, file=sys.stderr)
"""


def copied(folder):
    place = folder / PACKAGE.name
    shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("*.so"))
    return place


@pytest.fixture
def copy(tmp_path):
    """A copy of the router that can be changed."""
    return copied(tmp_path)


@pytest.fixture(scope="module")
def without_four(tmp_path_factory):
    """What becomes of what four features do where they are not: one process for all, for it takes a second to start."""
    copy = copied(tmp_path_factory.mktemp("without"))
    for name in WITHOUT_FOUR:
        remove(copy, name)
    return json.loads(python(copy, "-c", WITHOUT))


def change_list(copy, old, new):
    file = copy / "features/__init__.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def run(copy, *arguments):
    """Run Python with the copy in place of the router."""
    paths = [str(copy.parent), str(TESTS.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def python(copy, *arguments):
    """Run Python with the copy; return its output."""
    done = run(copy, *arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def remove(copy, name):
    shutil.rmtree(copy / "features" / name)
    change_list(copy, f'    "{name}",\n', "")


@cache
def text_of(file):
    """Return a test's text, with that of the support modules that import features when they are imported."""
    text = file.read_text()
    used = [text_of(TESTS.parent / f"support/{name}.py") for name in re.findall(r"^from support\.(\w+)", text, re.M)]
    return "\n".join(
        (text, *(more for more in used if re.search(r"^from pdrelay_proxy\.features\.(?!feature import)", more, re.M)))
    )


def names(file, name):
    """Tell whether a test is about a feature, too: it is among its tests, or names it, its command or a setting."""
    if TESTS / "features" / name in file.parents:
        return True
    place = f"pdrelay_proxy.features.{name}.settings"
    settings = fields(import_module(place).SETTINGS) if find_spec(place) else ()
    words = [rf"features\.{name}", f'"{name}"', *WHOLE, *[setting.name for setting in settings]]
    return re.search("|".join(words), text_of(file)) is not None


def about(file, features):
    return any(names(file, name) for name in features)


def passed(copy, files):
    """Run tests with the copy; return the summary's line."""
    options = (
        "-m",
        "pytest",
        "-q",
        "--maxfail=20",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=quick",  # more examples find no feature that is missed
        "-m",
        "not processes and not slow and not thorough",
    )
    return python(copy, *options, *map(str, files)).splitlines()[-1]


def test_without_their_folders_and_their_lines_all_features_are_gone(copy):
    """The rest serves as before: its tests pass."""
    for name in FEATURES:
        remove(copy, name)
    files = [file for file in map(TESTS.joinpath, SOME) if not about(file, FEATURES)]
    options = python(copy, "-m", "pdrelay_proxy.cli", "serve", "--help")

    assert len(files) > 1
    assert " passed" in passed(copy, files)
    assert [name for name in FEATURES if f"--{name}" in options] == []


@pytest.mark.slow  # hundreds of tests each
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("removed", [FEATURES, *((name,) for name in FEATURES)], ids=["all", *FEATURES])
def test_all_tests_of_the_rest_pass_without_a_feature(copy, removed):
    """Other features' too: none knows another. What names no feature passes without any."""
    for name in removed:
        remove(copy, name)
    rest = [name for name in FEATURES if name not in removed]
    files = [file for file in ALL if about(file, rest) == bool(rest) and not about(file, removed)]

    assert len(files) > 50
    assert " passed" in passed(copy, files)


def test_an_array_of_prompts_goes_to_one_engine_without_the_feature_that_divides_it(without_four):
    """As one whose prompts cannot go their own ways."""
    assert without_four["array"] == ['mode;desc="single", reason;desc="several_prompts"', 2, 0, 1]


def test_streams_do_not_move_without_the_feature_that_moves_them(without_four):
    """Who asks for it is told so; without move the engine is empty when they have ended."""
    detail = "this router has no feature that moves streams: drain without move"

    assert without_four["drain"] == [409, "[DONE]", 1, detail]


def test_engines_are_added_and_removed_without_the_feature_that_keeps_them(without_four):
    """The router has them in memory."""
    assert without_four["add"] == [["remove", 200, 2], ["add", 200, 3]]


def test_workers_are_refused_without_the_feature_that_has_them_meet(without_four):
    """Each would fill the same engines, and let in what the limits of all say."""
    assert without_four["workers"] == (
        "workers is 2, and this router has no feature by which workers tell each other of their requests: "
        "write workers = 1"
    )


def test_workers_do_not_start_without_the_feature_by_which_they_share_engines(without_four):
    """An engine that an operator adds would serve at one of them."""
    assert without_four["start"] == (
        "workers is 2, and this router has no feature by which workers share the engines that operators add: "
        "write workers = 1"
    )


def test_what_a_removed_feature_does_is_not_replayed(copy):
    """A tool says so, and replays the rest."""
    for name in ("kv_events", "roles", "expected_ttft", "pairs"):
        remove(copy, name)
    done = run(copy, "-c", REPLAYS)

    assert "2 requests" in done.stdout
    assert re.findall(r"no feature that \w+ \w+|exit \d", done.stderr) == [
        "exit 0",
        *("no feature that follows KV", "exit 2"),
        *("no feature that changes roles", "exit 2"),
        *("no feature that looks at", "exit 2"),
    ]


def test_the_page_s_example_is_a_feature(copy):
    """It has a flag, a metric and a part of the status page."""
    folder = copy / "features/slow_requests"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Slow requests."""\n')
    for title, code in re.findall(r'(?ms)^```python title="(\w+\.py)"\n(.*?)^```$', PAGE.read_text()):
        (folder / title).write_text(code)
    change_list(copy, "FEATURES: Final = (\n", 'FEATURES: Final = (\n    "slow_requests",\n')

    shown, help_ = python(copy, "-c", EXAMPLE).split("usage:", 1)
    shown = shown.splitlines()

    assert "pdrelay_slow_requests_total 1.0" in shown
    assert f"{shown[-1]} took " in shown[-2]
    assert "--slow-request" in help_
