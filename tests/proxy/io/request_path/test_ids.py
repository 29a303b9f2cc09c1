"""Names that nobody can guess."""

import random
import subprocess
import sys
import textwrap

import pytest

from pdrelay_proxy.io.request_path.ids import new_id, new_transfer

pytestmark = pytest.mark.processes


def test_no_name_comes_twice():
    """More of them than one slice of random bytes gives."""
    names = [new() for new in (new_id, new_transfer) for _ in range(2_000)]

    assert len({name.removeprefix("pdrelay-").removeprefix("xfer-") for name in names}) == len(names)
    assert {len(name) for name in names} == {len("pdrelay-") + 32, len("xfer-") + 32}


def test_the_state_of_pythons_generator_does_not_tell_the_names():
    """Who sees 624 outputs of a Mersenne twister knows all that follow; these come from the operating system."""
    state = random.getstate()
    try:
        first = [new_id() for _ in range(300)]
        random.setstate(state)
        second = [new_id() for _ in range(300)]
    finally:
        random.setstate(state)

    assert not set(first) & set(second)


def test_a_fork_does_not_give_the_names_of_its_parent():
    """It has a copy of all memory, and with it of the random bytes that were not used yet."""
    script = """
        import os
        from pdrelay_proxy.io.request_path.ids import new_id
        new_id()
        if child := os.fork():
            os.waitpid(child, 0)
        print(new_id(), flush=True)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=60
    )

    assert len(set(done.stdout.split())) == 2, done.stdout
