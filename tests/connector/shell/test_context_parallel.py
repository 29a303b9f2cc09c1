"""Engines whose ranks divide a context among them (DCP), or compute it together (PCP): P's bytes are where vLLM looks.

As in ``test_cache_kinds.py``, with several workers an engine: vLLM's scheduler and managers run, whose blocks are of
more tokens then; what the workers say is aggregated by vLLM. The rule of which rank keeps a token where is vLLM's own
(``support/token_slots.py``). What vLLM's NixlConnector would read, from which rank, must have moved, too.
"""

import dataclasses
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.DIVIDES_CONTEXTS:
        pytest.skip("context parallelism is refused in this version", allow_module_level=True)
    import torch

    from pdrelay_connector.shell import connector
    from pdrelay_connector.shell.cache_reader import TensorReader, shape_key
    from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
    from support import shard_mutants as mutants
    from support.cache_kinds import Pair, stories
    from support.divided_kinds import CONTEXTS, EQUAL, PAIRS, UNEQUAL, latent

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.verify.comparison import compare, sums_of
from pdrelay_connector.core.verify.sampling import Sampling
from pdrelay_connector.errors import UnsupportedCache
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(60)


# Where vLLM's own connector has an answer, it would move nothing else: latent vectors, parts of all ranks or of none,
# as many tokens in turn as in a block.
IN_TREE = {
    name: pair
    for name, pair in PAIRS.items()
    if all(
        side.interleave == 4 and side.kernel == 0 and side.shards in (1, side.ranks) and side.heads == 1
        for side in pair
    )
    and len({spec.block_size for side in pair for spec in side.specs}) == 1
    and "drafts" not in name
}


def exchange(name):
    """Play stories; returns what has happened in them."""
    counts = stories(*PAIRS[name], is_equal=False, compares_ranks=name in IN_TREE)

    assert counts["loads"] >= 4 * SEEDS
    assert counts["loaded"] >= counts["loads"] // 2
    assert counts["in-tree pairs"] >= (10 * SEEDS if name in IN_TREE else 0)
    return counts


@pytest.mark.parametrize("name", EQUAL)
def test_equal_engines_exchange_what_each_rank_keeps(name):
    """By pull and by push, with common beginnings, hits in both caches, and preemption."""
    assert exchange(name)["hits"] >= 1


def test_requests_that_are_preempted_go_on_with_their_own_bytes():
    """Few blocks; each of them is for more tokens than a rank keeps in it."""
    shape = latent(2, 2, blocks=14)
    counts = stories(shape, shape, 6, is_equal=False)

    assert counts["preempted"] >= 2
    assert counts["loaded"] >= 6


@pytest.mark.parametrize("name", ["latent vectors", "latent vectors, one token in turn", "two heads, each divided"])
def test_checksums_of_equal_engines_find_a_wrong_byte(name):
    """Of one rank, whose part of the sampled blocks it is in (``verify_share``)."""
    shape = EQUAL[name]
    pair = Pair(shape, shape)
    pair.ask("r", [1] * 33, 1, "pull")
    pair.run(5.0)
    ((_, _, (local,), _),) = pair.loads
    (remote,) = pair.p.finished_tables["p-r"]
    moved = [TokenRange(0, 0, 32, remote, local)]
    blocks = Sampling(1.0, 8).choose("r", [remote], sizes={0: 8}, states=set(), tokens=33)
    pair.d.caches[1]["l.0.0"].view(torch.uint8)[local[2], 0, 3, 5] ^= 1
    found = [
        compare(sums_of(rank, blocks, reader(pair.p, rank)), moved, reader(pair.d, rank)) for rank in range(shape.ranks)
    ]

    assert [each.checked for each in found] == [4] * shape.ranks
    assert [each.wrong for each in found] == [0, 1] + [0] * (shape.ranks - 2)


def reader(engine, rank):
    """Return what reads the cache of a rank, as its worker makes it."""
    key = shape_key(engine.connector._engine_config, WorkerRank(rank))
    return TensorReader(engine.caches[rank], engine.processes[rank].info.regions, key)


@pytest.mark.parametrize("name", UNEQUAL)
def test_engines_that_divide_otherwise_exchange_what_they_need(name):
    """Several ranks of P have what one of D's needs, or one has what several need."""
    exchange(name)


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_prefill_contexts_keep_is_served_once(name):
    """By one of those that keep the same; each has its part where they divide a prompt."""
    exchange(name)


@pytest.mark.parametrize(
    ("shards", "contexts", "rank"),
    [
        (1, 1, WorkerRank(3, 5)),
        (4, 1, WorkerRank(3, 5)),
        (1, 2, WorkerRank(3, 5, is_copy=True)),
        (2, 2, WorkerRank(1, 5)),
    ],
)
def test_a_worker_knows_which_part_it_keeps(monkeypatch, shards, contexts, rank):
    """It is tensor-parallel rank 3 of stage 5, and the second of its contexts, if there are several."""
    for name, number in {"get_pp_group": 5, "get_pcp_group": 1}.items():
        monkeypatch.setattr(connector, name, lambda number=number: SimpleNamespace(rank_in_group=number))
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 3)
    engine_config = EngineConfig(
        EngineId("p"), Address("127.0.0.1", 1), (), {}, 9, all_heads=1, ranks=4, is_producer=True, is_consumer=False,
        shards=shards, contexts=contexts,
    )  # fmt: skip

    assert connector._rank(engine_config) == rank


@pytest.mark.parametrize(
    "name", ["latent vectors, each part twice", "a state", "four parts to two", "two parts to four"]
)
def test_whatever_fails_no_other_bytes_are_read(name):
    """Connections break, engines stop past a lease, transfers hang and land late, clients leave."""
    p, d = (dataclasses.replace(shape, blocks=120) for shape in PAIRS[name])
    counts = stories(p, d, -(-SEEDS // 2), has_faults=True, is_equal=False)

    assert counts["faults"] >= SEEDS
    assert counts["loaded"] >= SEEDS


@pytest.mark.slow  # what the tests above find
@pytest.mark.parametrize(("mutate", "name"), mutants.MUTANTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_broken_rule_is_noticed(monkeypatch, mutate, name):
    """Each is one rule of the layout turned off; its name says which."""
    mutate(monkeypatch)

    with pytest.raises((AssertionError, UnsupportedCache)):
        most_are_loaded(*PAIRS[name])


def most_are_loaded(p, d):
    counts = stories(p, d, 6, is_equal=False)
    assert counts["loaded"] >= counts["loads"] // 2
