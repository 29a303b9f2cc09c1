"""Settings every test shares."""

import gc
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from pdrelay_proxy.io.build import find_build
from support import router_kind
from support.nursery_process import look_here

# A busy machine is not a failure; the health check, too, reads the clock: it gives ten examples half a minute.
settings.register_profile("pdrelay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdrelay")
settings.register_profile("quick", max_examples=25)  # a quarter, which make test tries: support.searching
# Hypothesis draws constants of the modules that are loaded, too, which no setting turns off: a test would try other
# orders of events beside other tests, and others again after a change that does not touch it.
providers._get_local_constants = lambda: providers._local_constants  # empty: only what it replaces fills it

# As ``make test-chaos test-e2e test-models``.
WITH_ENGINES = [Path(__file__).parent / folder for folder in ("chaos", "e2e", "models")]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Mark what a module's ``is_thorough`` (name of a test, its parameters) leaves to ``make test-thorough``."""
    for item in items:
        judge = getattr(getattr(item, "module", None), "is_thorough", None)
        if judge is not None and hasattr(item, "callspec") and judge(item.originalname, item.callspec.params):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("vllm") and not any(map(item.path.is_relative_to, WITH_ENGINES)):
            raise pytest.UsageError(
                f"{item.nodeid} is marked vllm, and make test-all would not run it: see WITH_ENGINES"
            )


def pytest_collection_finish():
    """What collecting has brought stays: tests that ask what can be freed need not look at all of PyTorch."""
    platform.platform()  # these two start programs when they are asked first, which is no test's doing
    find_build()
    if "torch" in sys.modules:  # two threads spin while one waits for the other: 8 ms in place of some µs
        sys.modules["torch"].set_num_threads(1)
    if "vllm" in sys.modules:
        look_here()
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(config, items):
    """Say which router is before the real engines. Compiling it may take two minutes: they are no test's."""
    if config.option.collectonly or not any(item.get_closest_marker("vllm") for item in items):
        return None
    return f"the router before real engines: {router_kind.said()}"


pytest_plugins = [
    "support.fixtures",  # real engines, started when the first test asks for them
    "support.tiers",
]
