"""Settings every test shares."""

from hypothesis import settings

settings.register_profile("xpyd", deadline=None)  # a busy machine is not a failure
settings.load_profile("xpyd")

pytest_plugins = ["support.fixtures"]  # real engines, started when the first test asks for them
