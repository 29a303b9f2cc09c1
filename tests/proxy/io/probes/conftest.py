"""Engines are looked at in simulated time: no test of this folder waits, or can be late."""

from support.simulated_loop import SimulatedLoop


def pytest_asyncio_loop_factories(config, item):
    """Run every coroutine on a loop that owns the clock."""
    return {"simulated": SimulatedLoop}
