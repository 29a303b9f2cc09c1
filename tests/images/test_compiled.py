"""The compiled router (docs/performance.md) does what the router does: many of its tests run once more on it.

mypyc makes C of Python and is nearly, not entirely, faithful: what it is known to get wrong in our code is looked for
before anything is compiled.
"""

import ast
import os
import subprocess
import sys
import tempfile

import pytest

from support.compiled import ROOT, NoCompiler, compiled, modules

pytestmark = pytest.mark.processes

# What a request and its answer go through, and what several routers say to each other.
SUITES = {
    "core": (
        "tests/proxy/core",
        *[
            f"tests/proxy/features/{name}/core"
            for name in ("expected_ttft", "kv_events", "moving_streams", "peers", "prompt_arrays")
        ],
    ),
    "requests": (
        "tests/proxy/requests",
        "tests/proxy/features/moving_streams/requests",
        "tests/proxy/features/prompt_arrays/requests",
    ),
    "features": ("tests/proxy/features/pairs", "tests/proxy/features/peers/core", "tests/proxy/features/slices"),
    "io": (
        "tests/proxy/io/wire/test_engines_contract.py",
        "tests/proxy/io/request_path",
        "tests/proxy/io/wire/test_hung_engines.py",
        "tests/proxy/io/test_metrics.py",
        "tests/proxy/io/probes/test_prober.py",
        "tests/proxy/io/discovery/test_engine_changes.py",
        "tests/proxy/io/discovery/test_reconciler.py",
        "tests/proxy/io/test_status.py",
        "tests/proxy/features/why/test_traces.py",
        "tests/proxy/io/wire/test_wire_connections.py",
        "tests/proxy/io/wire/test_wire_replies.py",
    ),
    "router": (
        "tests/proxy/test_app.py",
        "tests/proxy/test_clients_that_do_not_read.py",
        "tests/proxy/test_live.py",
        "tests/proxy/test_over_sockets.py",
        "tests/proxy/test_promises.py",
        "tests/proxy/test_scenes.py",
        "tests/proxy/test_workers.py",
    ),
}
# They look into the code in a way that only Python can be looked into.
_INSIDE = {
    "test_the_last_seconds_are_one_bin": "hands over pytest.approx as a number",
    "test_idle_connections_are_bounded": "changes a constant",
    "test_an_answer_to_ask_is_bounded": "changes a constant",
    "test_a_closed_connection_is_freed_at_once": "needs weak references",
    "test_a_fault_of_our_own_is_told_logged": "puts a fault into a module from outside",
    "test_a_client_that_cannot_be_told_anything": "the same",
    "test_pairing_costs": "counts what is looked at in a class of its own",
    "test_a_session_that_came_before": "the same",
}


def functions():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def classes():
    for path in modules():
        yield path, [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def test_no_compiled_module_makes_msgspec_types():
    """mypyc drops what their classes are told (``frozen``), and msgspec then reads their fields as something else."""
    odd = [path.name for path, found in classes() for each in found if "msgspec.Struct" in map(_name, each.bases)]

    assert odd == []


def test_no_function_catches_two_kinds_of_error_by_one_name():
    """mypyc gives the name the type of the first, and raises TypeError at the second."""
    odd = []
    for path, function in functions():
        kinds = {}
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and node.name is not None:
                kinds.setdefault(node.name, set()).add(ast.unparse(node.type))
        odd += [f"{path.name} {function.name}: {name}" for name, found in kinds.items() if len(found) > 1]

    assert odd == []


def test_no_compiled_class_is_derived_from_one_that_can_be_referred_to_weakly():
    """mypyc does not clear such references: whoever follows one later follows it into freed memory."""
    known = {"ABC", "Generic", "Protocol", "NamedTuple", "Exception", "ValueError"}
    known |= {"Enum", "StrEnum", "IntEnum", "FastStrEnum"}
    known |= {each.name for _, found in classes() for each in found}  # compiled, too
    odd = []
    for path, found in classes():
        odd += [f"{path.name} {each.name}" for each in found for base in each.bases if _name(base) not in known]

    assert odd == []


def _name(base):
    return base.id if isinstance(base, ast.Name) else ast.unparse(base).split("[")[0]


@pytest.fixture(scope="module")
def folder():
    try:
        return compiled()
    except NoCompiler as exc:
        pytest.skip(str(exc))


@pytest.mark.compiled
@pytest.mark.timeout(900)
def test_everything_that_is_to_be_compiled_is(folder):
    made = {str(path.relative_to(folder)).partition(".")[0] for path in (folder / "pdrelay_proxy").glob("**/*.so")}

    assert made == {str(path.relative_to(ROOT / "proxy").with_suffix("")) for path in modules()}


@pytest.mark.compiled
def test_a_router_knows_whether_it_is_compiled(folder):
    code = "from pdrelay_proxy.io.build import find_build; print(find_build().is_compiled)"
    asked = [sys.executable, "-c", code]

    said = [
        subprocess.run(asked, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=True)
        for place in (folder, ROOT / "proxy")
    ]

    assert [each.stdout for each in said] == ["True\n", "False\n"]


@pytest.mark.compiled
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES)
def test_the_compiled_router_passes_the_tests_of_the_router(folder, suite):
    """They are about what a router does, not about how; a few look inside, and cannot."""
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    without = " and ".join([f"not {name}" for name in _INSIDE])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "PYTEST"))}

    with tempfile.TemporaryDirectory() as inner:  # a short name: there are Unix sockets in it
        done = subprocess.run(
            [*asked, "--basetemp", f"{inner}/t", "-m", "not thorough", "-k", without, "-x", *SUITES[suite]],
            cwd=ROOT,
            env=env | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
