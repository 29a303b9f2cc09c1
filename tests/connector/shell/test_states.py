"""A state cannot be stepped back: D gets the one after all but the last prompt token, from one block, or none."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm import SamplingParams
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.request import Request, RequestStatus

    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.cache_specs import group_of
    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.decode_modes import PullDecode, PushDecode
    from pdrelay_connector.shell.engine_config import EngineConfig
    from pdrelay_connector.shell.fingerprint import _kind
    from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
    from pdrelay_connector.shell.prefill_requests import PrefillRequests
    from pdrelay_connector.shell.push_progress import PushProgress
    from pdrelay_connector.shell.supported_caches import check_supported

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import LentBlocks
from pdrelay_connector.errors import InvalidKvParams, PromptMismatch, UnsupportedCache
from pdrelay_connector.settings import Mode, Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS = 4, 30
STATE = "MAMBA2 state of (3, 8) torch.float32"
ALIGNED = CacheGroup(SIZE), CacheGroup(SIZE, state=STATE)  # vLLM's cache mode "align"
WHOLE = CacheGroup(SIZE), CacheGroup(2048, state=STATE)  # its mode "none": one block for the whole context
ATTENTION = (CacheGroup(SIZE),)
PROMPT = list(range(40, 50))  # of which 9 tokens are moved: three blocks
LENDS = {"do_remote_decode": True}


def engine(groups=ALIGNED, *, is_producer=True, lookahead=0):
    layers = {f"l.{number}": number for number in range(len(groups))}
    return EngineConfig(
        EngineId("e"), Address("10.0.0.1", 5600), groups, layers, BLOCKS, all_heads=1, ranks=1,
        is_producer=is_producer, is_consumer=True, lookahead=lookahead,
    )  # fmt: skip


def request(prompt=PROMPT, *, params=LENDS, **sampling):
    """One of vLLM's own, as its engine makes it."""
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": params}, **sampling)
    return Request("p-a", list(prompt), sampling, None)


class Prefills:
    """The prefill side of a scheduler, with vLLM's real block pool."""

    def __init__(self, groups=ALIGNED, *, is_producer=True, mode=Mode.PULL, lookahead=0):
        self.pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=SIZE)
        self.prefills = PrefillRequests(
            engine(groups, is_producer=is_producer, lookahead=lookahead),
            Settings(mode=mode),
            lambda _: None,
            pool=lambda: self.pool,
            counters=Counters(),
            signatures=Signatures(lambda: ()),
            wall_clock=lambda: 0.0,
        )

    def begin(self, asked):
        self.prefills.begin(asked, asked.kv_transfer_params or {})

    def finish(self, asked, *table):
        """Compute a request, and end it with these blocks; None stands for one that vLLM has freed."""
        self.pool.get_new_blocks(12)
        asked.num_computed_tokens, asked.status = asked.num_prompt_tokens, RequestStatus.FINISHED_LENGTH_CAPPED
        return self.prefills.finished(asked, [[block or 0 for block in ids] for ids in table])


def offered(prompt=PROMPT, groups=ALIGNED):
    """What P says of a prompt that it has computed."""
    p = Prefills(groups)
    asked = request(prompt)
    p.begin(asked)
    return p.finish(asked, [1, 2, 3], [None, 5, 6] if groups is ALIGNED else [6])


def test_p_computes_all_but_the_last_token():
    """D computes that, from the state before it."""
    prompt = list(PROMPT)
    p = Prefills()
    asked = request(prompt)
    p.begin(asked)

    assert (asked.num_prompt_tokens, asked.num_tokens, asked.max_tokens) == (9, 9, 1)
    assert asked.prompt_token_ids == list(asked.all_token_ids) == PROMPT[:9]
    assert prompt == PROMPT  # the API server's, in an engine of one process


@pytest.mark.parametrize("ids", [None, PROMPT], ids=["alone", "among tokens"])
def test_p_computes_a_prompt_given_as_embeddings_but_for_the_last_one(ids):
    """Alone they have no token ids; among tokens a mask says which is which."""
    embeds = torch.arange(20.0).reshape(10, 2)
    mask = None if ids is None else [True] * 10
    sampling = SamplingParams(max_tokens=1)
    asked = Request("p-a", ids, sampling, None, prompt_embeds=embeds, prompt_is_token_ids=mask)
    Prefills().begin(asked)

    assert (asked.num_prompt_tokens, asked.num_tokens, len(asked.prompt_embeds)) == (9, 9, 9)
    assert mask is None or len(asked.prompt_is_token_ids) == 9


@pytest.mark.parametrize(
    ("groups", "prompt", "is_producer"),
    [(ATTENTION, PROMPT, True), (ALIGNED, PROMPT[:1], True), (ALIGNED, PROMPT, False)],
    ids=["attention only", "one token", "no producer"],
)
def test_p_computes_every_other_prompt_whole(groups, prompt, is_producer):
    """KV of the last token does no harm, a prompt of one token is not moved, and a consumer hands nothing over."""
    asked = request(prompt)
    Prefills(groups, is_producer=is_producer).begin(asked)

    assert (asked.num_prompt_tokens, asked.max_tokens) == (len(prompt), 5)


@pytest.mark.parametrize("mode", Mode)
def test_a_request_for_its_prompts_logprobs_is_not_handed_over(mode):
    """It needs all of the prompt here, and its decode engine loads nothing."""
    p = Prefills(mode=mode)
    asked = request(prompt_logprobs=1)
    p.begin(asked)

    assert asked.num_prompt_tokens == 10
    assert p.finish(asked, [1, 2, 3], [None, 5, 6]) is None


@pytest.mark.parametrize(("groups", "table"), [(ALIGNED, [4, 5, 6]), (ALIGNED, [None, 5, 6, 7]), (WHOLE, [6, 7])])
def test_p_lends_the_block_of_the_last_state(groups, table):
    """Not the one before it, nor those that vLLM keeps behind it for drafted tokens."""
    p = Prefills(groups)
    asked = request()
    p.begin(asked)
    params = p.finish(asked, [1, 2, 3], table)

    assert params["remote_block_ids"] == ((1, 2, 3), (6,))
    assert params["pdrelay_block_sizes"] == (SIZE, 1)
    assert params["remote_num_tokens"] == 9
    assert {block for block in range(BLOCKS) if p.pool.blocks[block].ref_cnt > 1} >= {1, 2, 3, 6}
    assert all(p.pool.blocks[block].ref_cnt == 1 for block in (4, 5, 7))


def loads(params, *, groups=ALIGNED, prompt=PROMPT, external=9, table=(11, 12, 13)):
    """Return what D reads for an offer."""
    d = PullDecode(engine(groups), Signatures(lambda: ()), lambda: 0.0)
    asked = request(prompt, params=params)
    tokens = engine(groups).loaded_tokens(len(prompt))
    d.start(asked, d.read(asked, params), tokens, external, [[21, 22, 23], list(table)])
    (order,) = d.take_orders()
    return list(order.token_ranges)


@pytest.mark.parametrize("theirs", [ALIGNED, WHOLE])
@pytest.mark.parametrize(("ours", "table"), [(ALIGNED, (0, 0, 13)), (WHOLE, (13, 14))])
def test_d_reads_one_state(theirs, ours, table):
    """Into the block from which vLLM computes the next token, whatever the cache modes of both."""
    kv, state = loads(offered(groups=theirs), groups=ours, table=table)

    assert kv == TokenRange(0, 0, 9, (1, 2, 3), [21, 22, 23])
    assert state == TokenRange(1, 8, 9, (6,), [13])


def test_d_reads_all_of_a_state_whatever_its_own_cache_has():
    """A hit spares KV of tokens. The state at the hit is another one."""
    kv, state = loads(offered(), external=1)

    assert kv == TokenRange(0, 8, 9, (3,), [23])
    assert state == TokenRange(1, 8, 9, (6,), [13])


@pytest.mark.parametrize(
    "change",
    [
        {"remote_num_tokens": 10},
        {"remote_num_tokens": 12},
        {"remote_block_ids": [[1, 2, 3], [0]]},
        {"remote_block_ids": [[1, 2, 3], []]},
        {"remote_block_ids": [[1, 2, 3], [5, 6]]},
    ],
    ids=repr,
)
def test_any_other_state_costs_a_local_prefill(change):
    """One that has the last token in it would take it in twice; the text would be wrong, with HTTP 200."""
    with pytest.raises(InvalidKvParams, match="state"):
        loads(offered() | change)


@pytest.mark.parametrize("groups", [ATTENTION, ALIGNED], ids=["attention", "state"])
def test_drafts_that_look_three_tokens_ahead_are_computed_by_d(groups):
    """P leaves out two tokens: it would fill the drafts' KV of them with guesses, which D would keep."""
    p = Prefills(groups, lookahead=3)
    asked = request()
    p.begin(asked)
    table = [[1, 2, 3], [None, 5, 6]][: len(groups)]
    params = p.finish(asked, *table)
    d = PullDecode(engine(groups, lookahead=3), Signatures(lambda: ()), lambda: 0.0)
    ours = request(params=params)
    tokens = engine(groups, lookahead=3).loaded_tokens(ours.num_prompt_tokens)
    d.start(ours, d.read(ours, params), tokens, 8, [[21, 22, 23], [0, 12, 13]][: len(groups)])
    (order,) = d.take_orders()

    assert (asked.num_prompt_tokens, params["remote_num_tokens"]) == (8, 8)
    expected = [TokenRange(0, 0, 8, (1, 2), [21, 22]), TokenRange(1, 7, 8, (5,), [12])]
    assert list(order.token_ranges) == expected[: len(groups)]


def test_the_state_of_a_whole_prompt_belongs_to_another_prompt():
    """P that did not leave out the last token says so by its digest, too."""
    p = Prefills(ATTENTION)
    asked = request()
    p.begin(asked)
    whole = p.finish(asked, [1, 2, 3])

    with pytest.raises(PromptMismatch):
        loads(offered() | {"pdrelay_prompt": whole["pdrelay_prompt"]})


def test_a_prompt_of_one_token_needs_no_state():
    """D computes it; the offer is valid, so that P's lease ends at once."""
    d = PullDecode(engine(), Signatures(lambda: ()), lambda: 0.0)
    p = Prefills()
    asked = request(PROMPT[:1])
    p.begin(asked)
    params = p.finish(asked, [1], [6])

    assert d.read(request(PROMPT[:1], params=params), params).remote_num_tokens == 1


def test_in_push_d_lends_one_block_for_the_state():
    """It is registered under the token whose state it is to hold."""
    posted = []
    d = PushDecode(engine(), posted.append, OffloadedBlocks())
    where = {"remote_engine_id": "p", "remote_host": "10.0.0.2", "remote_port": 5600, "transfer_id": "t"}
    asked = request(params=where)
    blocks = d.start(asked, d.read(asked, where), 9, 9, [[21, 22, 23], [0, 0, 13]])
    orders = []
    receiver = SimpleNamespace(expect=lambda order, now: orders.append(order))
    posted[0](SimpleNamespace(push_receiver=receiver), 0.0)

    assert orders[0].groups == (LentBlocks(0, 9, (21, 22, 23)), LentBlocks(8, 9, (13,)))
    assert orders[0].prompt == offered()["pdrelay_prompt"]
    assert blocks == [21, 22, 23, 13]


def test_in_push_a_state_is_announced_at_the_end_of_the_prompt_only():
    """Every step before it changes it, or writes another block."""
    progress = PushProgress(ALIGNED)
    asked = request()
    asked.num_computed_tokens = 8
    progress.begin(asked, "t", "digest")
    output = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        num_scheduled_tokens={"p-a": 1},
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: ([1, 2, 3], [0, 5, 6])),
    )  # fmt: skip
    (piece,) = progress.take_computed(output)
    progress.finish(asked, [[1, 2, 3], [6]])
    (last,) = progress.take_computed(output)

    assert list(map(list, piece.groups)) == [[1, 2], []]
    assert list(map(list, last.groups)) == [[3], [6]]


def states(rows=BLOCKS, width=96, padding=32):
    """A layer's states as vLLM passes them: one row of bytes for each block, with the padding of its page."""
    memory = torch.arange(rows * (width + padding), dtype=torch.int32).to(torch.int8).reshape(rows, 1, 1, -1)
    return memory[:, :, :, :width]


def described(caches, kernel_layout=KernelLayout.TRANSPOSED):
    return describe_caches(caches, engine(), BLOCKS, kernel_layout)


def test_a_state_is_one_entry_of_each_block():
    """Beside attention layers whose K and V are two regions; it is neither cut nor a reason not to cut them."""
    kv = torch.zeros(BLOCKS, 1, SIZE, 16)
    k, v, state = described({"l.0": kv, "l.1": (cache := states())})

    assert (k.state, v.state, k.opaque) == (False, False, False)
    assert (state.base, state.count, state.row_stride, state.width) == (cache.data_ptr(), BLOCKS, 128, 96)
    assert (state.block_size, state.blocks, state.group, state.state, state.opaque) == (1, BLOCKS, 1, True, False)


@pytest.mark.parametrize("cache", [states(rows=2 * BLOCKS), states()[:, :, :, ::2], states().expand(-1, 2, 1, -1)])
def test_a_state_of_another_shape_is_refused(cache):
    """We would read bytes that are not the state's."""
    with pytest.raises(UnsupportedCache, match=r"layer l\.1 keeps its states with shape"):
        described({"l.0": torch.zeros(BLOCKS, 1, SIZE, 16), "l.1": cache})


def spec(**changes):
    fields = {
        "block_size": 16, "shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.float32, torch.float32),
        "mamba_type": MambaAttentionBackendEnum.MAMBA2,
    }  # fmt: skip
    return MambaSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": ((8, 3), (2, 4, 4))},  # the convolution's state in its other layout
        {"dtypes": (torch.float32, torch.bfloat16)},
        {"mamba_type": MambaAttentionBackendEnum.GDN_ATTN},
    ],
    ids=repr,
)
def test_engines_with_unlike_states_never_meet(change):
    """The bytes would be as many; they would mean something else."""
    assert _kind(group_of(spec(**change))) != _kind(group_of(spec()))
    assert _kind(group_of(spec(block_size=2048))) == _kind(group_of(spec()))


@pytest.mark.parametrize(
    ("spares_loads", "mode", "says"),
    [
        (
            True,
            "align",
            r"layer l\.0 keeps a state of 3 tensors",
        ),  # where a ring of inputs begins, only its writer knows
        (True, "all", r"layer l\.0 keeps a state and mamba_cache_mode is all.*start with --mamba-cache-mode align"),
        (False, "none", r"layer l\.0 keeps a state, and vLLM .* zeroes the blocks .* need vLLM 0\.32 or later"),
    ],
)
def test_a_state_that_cannot_be_moved_is_refused_at_start(monkeypatch, spares_loads, mode, says):
    """Of a kind, or by a version of vLLM, that would give wrong text."""
    monkeypatch.setattr(vllm_versions, "ASKS_WHAT_IS_LOADED", spares_loads)
    ring = spec(shapes=((3, 8), (2, 4, 4), (2, 16)), dtypes=(torch.float32,) * 3, mamba_cache_mode=mode)
    group = SimpleNamespace(kv_cache_spec=ring, layer_names=["l.0"], enable_kv_transfer=True, host_resident=False)
    config = SimpleNamespace(parallel_config=None)
    with pytest.raises(UnsupportedCache, match=says):
        check_supported(config, SimpleNamespace(kv_cache_groups=[group]))


def test_vllm_zeroes_no_block_that_is_loaded():
    """It zeroes new blocks of models with a state, in the step in which the load begins."""
    connector = object.__new__(PDRelayConnector)
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=["attention", "state"])

    assert connector.get_loaded_kv_cache_group_ids(request()) == (0, 1)


@pytest.mark.parametrize(("more", "expected"), [((), True), ((CacheGroup(SIZE, window=8),), False)])
def test_d_may_hit_kv_without_its_state(more, expected):
    """Each load brings a state. What a window lacks before the hit, no load would bring."""
    connector = object.__new__(PDRelayConnector)
    connector._engine_config = engine((*ALIGNED, *more))

    assert connector.supports_divergent_local_hybrid_hits is expected
