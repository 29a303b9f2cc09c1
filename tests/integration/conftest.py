"""Connectors without engines, each in a process of its own."""

import pytest

from support.nixl_process import NixlProcess


@pytest.fixture
def start(request):
    """Start processes, all at once, and end them; a module's ``MODE`` says who moves the blocks (default: pull)."""
    mode = getattr(request.module, "MODE", "pull")
    started = []

    def start(*names, **options):
        new = [NixlProcess(name, mode=mode, **options) for name in names]
        started.extend(new)
        return [process.ready() for process in new]

    yield start
    for process in started:
        process.__exit__()
