"""Pipeline stages with real NIXL agents over TCP: the CPU build of vLLM 0.32 cannot compute with them.

``nixl_process`` has three layers, and one process for all workers of an engine, each with an agent of its own.
"""

import pytest

from support.nixl_process import ALL, NixlProcess, same

pytestmark = pytest.mark.nixl

ONE = (3,)
TWO = (1, 2)
THREE = (1, 1, 1)
FROM, INTO = [3, 4, 5, 9, 2], [10, 12, 11, 1, 30]


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ((TWO, 1), (ONE, 1)),
        pytest.param((ONE, 1), (TWO, 1), marks=pytest.mark.slow),
        pytest.param((TWO, 2), (THREE, 1), marks=pytest.mark.slow),
        pytest.param((THREE, 1), ((2, 1), 2), marks=pytest.mark.slow),
    ],
    ids=["2-to-1", "1-to-2", "2-of-tp2-to-3", "3-to-2-of-tp2"],
)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_every_layer_is_moved_whatever_the_stages(mode, p, d):
    """Bit by bit, in every worker; nothing beside them is touched, and the lease ends with the last worker."""
    shapes = {"p": p, "d": d}
    processes = [NixlProcess(name, mode=mode, stages=stages, ranks=ranks) for name, (stages, ranks) in shapes.items()]
    with processes[0] as source, processes[1] as target:
        for process in processes:
            process.ready()
        source.ask("fill", seed=1)
        target.ask("fill", seed=2)
        others = [block for block in ALL if block not in INTO]
        before = target.ask("digests", blocks=others)
        if mode == "pull":
            source.ask("lend", requests=["a"])
            target.load("a", source, FROM, INTO)
        else:
            target.expect("a", source, INTO)
            source.push("a", FROM[:2], last=False)
            source.push("a", FROM[2:])

        assert target.result("a").failure == ""
        assert same(source, FROM, target, INTO)
        assert target.ask("digests", blocks=others) == before
