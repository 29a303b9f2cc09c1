"""The engine thread's halves of return_kv: the look-up in vLLM's prefix cache, and the prefill that waits for it."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from pdrelay_connector.shell.block_shortage import ShortRequest
    from pdrelay_connector.shell.cached_prefixes import LEAST_IMPORTANT, CachedPrefixes
    from pdrelay_connector.shell.decode_requests import DecodeRequests
    from pdrelay_connector.shell.engine_config import EngineConfig
    from pdrelay_connector.shell.metadata import WorkerMetadata
    from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
    from pdrelay_connector.shell.prefill_requests import PrefillRequests
    from pdrelay_connector.shell.prefix_hashes import PIECE, pack_tokens, prefix_hasher
    from pdrelay_connector.shell.returned_prefixes import CACHED_ON, ReturnedPrefixes

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLookup, Question
from pdrelay_connector.core.cached_prefix.prefill_scheduler import SearchEnded
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import MAX_SALT, FindPrefix
from pdrelay_connector.settings import Mode, Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS = 4, 20
HASH = "sha256_cbor"
PROMPT = list(range(100, 113))  # three full blocks and one token
STEP = SimpleNamespace(total_num_scheduled_tokens=3)
IDLE = SimpleNamespace(total_num_scheduled_tokens=0)
QUESTION = Question(ConnId(3), RequestId("theirs"))


class Recorder:
    """What is said to the control thread, in order: names and arguments."""

    def __init__(self):
        self.said = []

    def post(self, command):
        command(self, 0.0)

    def __getattr__(self, name):
        if name in {"prefix_lender", "prefix_finder", "lease_renewer"}:
            return self
        return lambda *args, **kwargs: self.said.append((name, args))

    def names(self):
        return [name for name, _ in self.said]


class Side:
    """Both halves on one engine, with vLLM's block pool."""

    def __init__(self, *, recomputes=True, mode=Mode.PULL, **choices):
        init_none_hash(get_hash_fn_by_name(HASH))
        self.control, self.counters = Recorder(), Counters()
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
        config = EngineConfig(
            EngineId("here"), Address("127.0.0.1", 1), (CacheGroup(SIZE),), {"l.0": 0}, BLOCKS, all_heads=1, ranks=1,
            is_producer=True, is_consumer=True, prefix_hash=HASH, recomputes=recomputes,
        )  # fmt: skip
        parts = {"pool": lambda: self.pool, "counters": self.counters, "signatures": Signatures(lambda: ())}
        parts["wall_clock"] = lambda: 0.0
        self.prefills = PrefillRequests(config, Settings(mode=mode, **choices), self.control.post, **parts)
        self.decodes = DecodeRequests(config, mode, self.control.post, live=list, offloaded=OffloadedBlocks(), **parts)
        self.cached = CachedPrefixes(
            config, self.prefills, self.control.post, pool=lambda: self.pool, counters=self.counters
        )
        self.returned = ReturnedPrefixes(config, self.decodes, self.control.post, self.counters)

    def cache(self, request):
        """VLLM schedules a request: its full blocks are in the prefix cache at once."""
        number = request.num_tokens // SIZE
        blocks = self.pool.get_new_blocks(number)
        self.pool.cache_full_blocks(request, blocks, 0, number, SIZE, 0)
        return blocks

    def want(self, tokens=PROMPT, salt=None):
        hashes = whole(prefix_hasher(HASH, SIZE)(FindPrefix(RequestId("theirs"), pack_tokens(tokens), salt)))
        self.cached.add(PrefixLookup(QUESTION, hashes))

    def answers(self):
        """Return the blocks of each answer."""
        return [list(args[3]) for name, args in self.control.said if name == "answer"]

    def free(self):
        return self.pool.get_num_free_blocks()


def whole(pieces):
    return [each for piece in pieces for each in piece]


def request(tokens=PROMPT, salt=None, name="ours", params=None, hasher=None, **options):
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(
            max_tokens=4, extra_args={"kv_transfer_params": params} if params else None, **options
        ),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=hasher or get_request_block_hasher(SIZE, get_hash_fn_by_name(HASH)),
    )


@pytest.fixture(params=Mode)
def side(request):
    """However prompts are handed over, what goes back is read."""
    return Side(mode=request.param)


@pytest.mark.parametrize("salt", [None, "a tenant"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_hashes_are_vllms_own(algorithm, salt):
    """Of a request with the same tokens and salt; with another salt none is equal."""
    init_none_hash(get_hash_fn_by_name(algorithm))
    real = Request(
        request_id="ours",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(SIZE, get_hash_fn_by_name(algorithm)),
    )
    hashes = prefix_hasher(algorithm, SIZE)

    assert whole(hashes(FindPrefix(RequestId("r"), pack_tokens(PROMPT), salt))) == list(real.block_hashes)
    others = whole(hashes(FindPrefix(RequestId("r"), pack_tokens(PROMPT), "another")))
    assert not set(others) & set(real.block_hashes)


def test_tokens_that_are_cut_off_are_no_tokens():
    """A peer's bytes, whatever their number."""
    assert whole(prefix_hasher(HASH, SIZE)(FindPrefix(RequestId("r"), pack_tokens(PROMPT)[:7], None))) == []


@pytest.mark.parametrize("size", [16, 48, PIECE + 1])
def test_a_long_prompt_is_hashed_in_pieces(size):
    """The thread that hashes answers heartbeats, too. A block may end in another piece than it begins in."""
    init_none_hash(get_hash_fn_by_name(HASH))
    tokens = [number % 1000 for number in range(3 * PIECE + 77)]
    asked = FindPrefix(RequestId("r"), pack_tokens(tokens), None)

    pieces = list(prefix_hasher(HASH, size)(asked))

    hash_of_request = get_request_block_hasher(size, get_hash_fn_by_name(HASH))
    assert whole(pieces) == list(request(tokens, hasher=hash_of_request).block_hashes)
    assert all(len(piece) <= PIECE // size + 1 for piece in pieces)


def test_what_is_cached_is_pinned_and_leased(side):
    blocks = side.cache(request())
    side.pool.free_blocks(reversed(blocks))
    free = side.free()

    side.want()
    side.cached.look_up()

    assert side.answers() == [[block.block_id for block in blocks]]
    assert side.control.names() == ["lend", "answer"]
    assert side.free() == free - len(blocks)
    (lease,) = side.prefills._held_blocks._leases
    side.prefills.lease_ended(lease, LeaseEvent.DONE)
    assert side.free() == free


@pytest.mark.parametrize(("tokens", "salt"), [(PROMPT, "other"), ([1, *PROMPT], None)])
def test_of_another_prompt_nothing_is_found(side, tokens, salt):
    side.cache(request())

    side.want(tokens, salt)
    side.cached.look_up()

    assert side.answers() == [[]]
    assert side.counters._counts["prefixes_missed"] == 1


def test_only_a_beginning_without_gaps_is_found(side):
    blocks = side.cache(request())
    side.pool.free_blocks(reversed(blocks))
    side.pool.evict_blocks({blocks[1].block_id})

    side.want()
    side.cached.look_up()

    assert side.answers() == [[blocks[0].block_id]]


def test_the_answer_waits_for_the_steps_that_may_still_compute(side):
    """VLLM caches a block when it schedules it. With asynchronous scheduling two steps are under way."""
    side.cached.scheduled(STEP)
    side.cache(request())
    last = side.cached.scheduled(STEP)
    side.want()
    side.cached.look_up()
    assert side.control.names() == ["lend"]

    side.cached.ended(last - 1)
    assert side.answers() == []
    side.cached.ended(last)
    assert len(side.answers()) == 1


def test_what_could_not_be_loaded_was_not_cached_after_all(side):
    """Another connector loads a block in the step after which the question was to be answered."""
    step = side.cached.scheduled(STEP)
    blocks = side.cache(request())
    side.want()
    side.cached.look_up()
    side.cached.leave_out({blocks[1].block_id})
    side.cached.ended(step)

    assert side.answers() == [[]]


def test_an_idle_step_computes_nothing(side):
    side.cache(request())

    assert side.cached.scheduled(IDLE) == 0
    side.want()
    side.cached.look_up()
    assert len(side.answers()[0]) == 3


def test_what_leases_may_hold_is_bounded():
    side = Side(max_leases=1)
    side.cache(request())
    for _ in range(2):
        side.want()
    side.cached.look_up()

    assert [len(blocks) for blocks in side.answers()] == [0, 3] or [len(b) for b in side.answers()] == [3, 0]
    assert side.counters._counts["prefixes_refused"] == 1


def test_a_request_that_lacks_blocks_has_them_revoked_at_once(side):
    """They are worth less than whatever waits here; leases of prefills keep their ten seconds."""
    blocks = side.cache(request())
    side.pool.free_blocks(reversed(blocks))
    side.want()
    side.cached.look_up()
    side.pool.get_new_blocks(side.free() - 1)
    side.control.said.clear()

    side.cached.relieve(ShortRequest(request(name="waits"), 3), now=5.0)

    ((name, args),) = side.control.said
    assert name == "revoke"
    assert [lease.request for lease in args[0]] == list(side.prefills._held_blocks._leases)
    assert side.prefills._held_blocks._leases[args[0][0].request].priority == LEAST_IMPORTANT


# ---- P


def found(tokens=12, size=SIZE):
    blocks = tuple(BlockId(number) for number in range(1, tokens // size + 1))
    return PullParams(
        EngineId("d"), RequestId("cached-1"), "127.0.0.1", 1, (blocks,), tokens, pdrelay_block_sizes=(size,)
    )


def asking(side, *, computed=0, **options):
    """A prefill that was told of an engine, as vLLM considers it."""
    params = {"do_remote_decode": True, CACHED_ON: options.pop("engine", "d")}
    prefill = request(params=params, **options)
    side.returned.begin(prefill, params)
    return prefill, side.returned.searches(prefill, computed)


def test_a_prefill_asks_once_and_waits(side):
    prefill, waits = asking(side)

    assert waits
    assert side.returned.searches(prefill, 0)
    assert side.control.names() == ["find"]
    question, engine = side.control.said[0][1]
    assert (question.tokens, engine) == (pack_tokens(PROMPT[:-1]), "d")


@pytest.mark.parametrize("engine", ["", 7, "x" * 300, "line\nbreak", ["d"]])
def test_a_name_that_is_none_is_not_asked(side, engine):
    assert not asking(side, engine=engine)[1]
    assert side.counters._counts["prefixes_unsupported"] == 1


@pytest.mark.parametrize("options", [{"prompt_logprobs": 1}, {"salt": "x" * (MAX_SALT + 1)}])
def test_a_prompt_that_cannot_be_looked_up_is_computed(side, options):
    assert not asking(side, **options)[1]
    assert side.control.said == []


def test_a_prompt_that_is_cached_here_is_not_asked_for(side):
    assert not asking(side, computed=12)[1]
    assert side.control.said == []


def test_an_engine_on_which_a_failed_load_ends_its_request_asks_nobody():
    """The search is for speed alone: it must not cost an answer."""
    assert not asking(Side(recomputes=False))[1]


def test_what_was_found_is_loaded_behind_what_is_cached(side):
    prefill, _ = asking(side, computed=4)
    side.returned.ended(SearchEnded(RequestId("ours"), found()))

    assert not side.returned.searches(prefill, 4)
    assert side.decodes.matched_tokens(prefill, 4) == (8, True)
    side.decodes.allocated(prefill, SimpleNamespace(get_block_ids=lambda: ([5, 6, 7, 8],)), 8)
    (order,) = side.decodes.metadata(IDLE).orders
    (whole,) = order.token_ranges
    assert (whole.start, whole.stop, list(whole.remote), list(whole.local)) == (4, 12, [2, 3], [6, 7])


def test_what_was_evicted_here_meanwhile_is_loaded_too(side):
    """D leases the whole beginning, so it does not matter what is cached here when the load begins."""
    prefill, _ = asking(side, computed=4)
    side.returned.ended(SearchEnded(RequestId("ours"), found()))

    assert side.decodes.matched_tokens(prefill, 0) == (12, True)


def test_what_this_engine_has_already_is_given_back(side):
    asking(side, computed=8)
    side.returned.ended(SearchEnded(RequestId("ours"), found(8)))

    assert side.control.names() == ["find", "give_back"]


@pytest.mark.parametrize("late", [True, False])
def test_a_request_that_ends_while_it_waits_gives_back_what_comes(side, late):
    prefill, _ = asking(side)
    side.returned.finished(prefill)
    if late:  # the answer was on its way to the engine thread
        side.returned.ended(SearchEnded(RequestId("ours"), found()))

    assert side.control.names() == ["find", "cancel", *(["give_back"] if late else [])]
    assert not side.returned.is_searching


def test_a_search_that_finds_nothing_lets_the_prefill_go_on(side):
    prefill, _ = asking(side)
    side.returned.ended(SearchEnded(RequestId("ours"), None))

    assert not side.returned.searches(prefill, 0)
    assert side.decodes.matched_tokens(prefill, 0) == (0, False)


def reading(side):
    """A prefill whose blocks are allocated, and which is read from D."""
    prefill, _ = asking(side)
    side.returned.ended(SearchEnded(RequestId("ours"), found()))
    side.decodes.matched_tokens(prefill, 0)
    ids = [block.block_id for block in side.pool.get_new_blocks(4)]
    side.decodes.allocated(prefill, SimpleNamespace(get_block_ids=lambda: (ids,)), 12)
    return prefill


def test_a_read_is_ordered_and_announced_in_either_mode(side):
    """D revokes leases that nobody reads first."""
    reading(side)

    assert side.control.names() == ["find", "start_renewing", "read_started"]
    assert [order.request for order in side.decodes.metadata(IDLE).orders] == ["ours"]
    assert side.decodes.metadata(IDLE).orders == []
    side.decodes.loads_ended(["ours"])
    assert side.control.names()[3:] == ["stop_renewing"]


def test_an_engine_that_reads_steps_without_waiting(side):
    """In push, too: the workers report the end of a read with a step, whoever hands prompts over."""
    prefill, _ = asking(side)
    assert side.decodes.may_wait(is_searching=side.returned.is_searching)
    side.returned.ended(SearchEnded(RequestId("ours"), found()))
    side.decodes.allocated(prefill, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 12)
    assert not side.decodes.may_wait()

    side.decodes.loads_ended(["ours"])
    assert not side.decodes.awaits_quarantine


def test_blocks_of_a_read_that_failed_are_kept_from_others(side):
    """Until the workers report that nothing writes into them any more, with a step."""
    reading(side)
    free = side.free()
    blocks = [side.pool.blocks[block] for block in side.decodes._remote_prefills["ours"].into]
    side.decodes.update_quarantine(WorkerMetadata(quarantined=[RequestId("ours")]))
    side.decodes.loads_ended(["ours"])
    side.pool.free_blocks(reversed(blocks))
    assert (side.free(), side.decodes.awaits_quarantine) == (free, True)
    assert side.decodes.may_wait()

    side.decodes.update_quarantine(WorkerMetadata(released=[RequestId("ours")]))
    assert (side.free(), side.decodes.awaits_quarantine) == (free + len(blocks), False)


def test_the_end_of_a_lease_of_cached_blocks_is_nothing_that_workers_must_hear(side):
    """In push they hear of the end of transfers, with a step of their own."""
    side.cache(request())
    side.want()
    side.cached.look_up()
    (lease,) = side.prefills._held_blocks._leases
    side.prefills.lease_ended(lease, LeaseEvent.DONE)

    assert not side.prefills.has_pending
