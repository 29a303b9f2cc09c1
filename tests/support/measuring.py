"""Measurements in a process of their own: here are the heap of all other tests and the coverage tracer."""

import asyncio
import os
import sys


async def said_by(module, *arguments):
    """Run a module as a script to its end, and return what it prints; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    measuring = await asyncio.create_subprocess_exec(
        sys.executable, module.__file__, *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await measuring.communicate()
    finally:
        if measuring.returncode is None:
            measuring.kill()
            await measuring.wait()
    assert measuring.returncode == 0
    return said
