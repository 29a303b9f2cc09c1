"""Settings every test shares."""

import pytest
from hypothesis import settings

settings.register_profile("xpyd", deadline=None)  # a busy machine is not a failure
settings.load_profile("xpyd")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Mark what a module's ``is_thorough`` (name of a test, its parameters) leaves to ``make test-thorough``."""
    for item in items:
        judge = getattr(getattr(item, "module", None), "is_thorough", None)
        if judge is not None and hasattr(item, "callspec") and judge(item.originalname, item.callspec.params):
            item.add_marker(pytest.mark.thorough)


pytest_plugins = ["support.fixtures"]  # real engines, started when the first test asks for them
