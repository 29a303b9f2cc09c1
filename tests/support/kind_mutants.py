"""Rules of caches' kinds, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

As in ``support.pull_mutants``; ``shell/test_cache_kinds.py`` shows that each of these is noticed.
"""

import dataclasses
import importlib
import warnings

from msgspec.structs import replace

from pdrelay_connector.core.layout import transfer_plan
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.messages import RankInfo
from support.cache_kinds import views_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    from pdrelay_connector.core.ids import Address, EngineId
    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.cache_specs import group_of, is_packed, specs_by_layer
    from pdrelay_connector.shell.engine_config import EngineConfig

SHELL = "pdrelay_connector.shell"


def described(shape):
    """Return what an engine of a shape tells its peers, without an engine."""
    groups = [
        KVCacheGroupSpec([f"l.{layer}.{number}" for layer in range(shape.depth)], spec)
        for number, spec in enumerate(shape.specs)
    ]
    specs = {name: spec for group in groups for name, spec in specs_by_layer(group)}
    tokens_per_entry = {name: vllm_versions.tokens_per_entry(spec) for name, spec in specs.items()}
    engine = EngineConfig(
        EngineId("e"), Address("10.0.0.1", 5600), tuple(group_of(spec) for spec in shape.specs),
        {name: number for number, group in enumerate(groups) for name in group.layer_names}, shape.blocks,
        all_heads=max(getattr(spec, "num_kv_heads", 1) for spec in shape.specs), ranks=1, is_producer=True,
        is_consumer=True, tokens_per_entry=tokens_per_entry,
        packed_layers=frozenset(name for name, spec in specs.items() if is_packed(spec)),
    )  # fmt: skip
    caches = {}
    for group in groups:
        caches |= views_of(group.kv_cache_spec, group.layer_names, shape.blocks, shape.layout, shape.kernel)
    return RankInfo(0, 1, b"e", "DRAM", 0, describe_caches(caches, engine, shape.blocks, KernelLayout.ENTRIES))


def _changed(**changes):
    return lambda group: dataclasses.replace(group, **changes)


def _as_if(patch, name, change, holds):
    """Have a rule of groups see another group, where something holds of the group."""
    rule = getattr(CacheGroup, name)
    patch.setattr(CacheGroup, name, lambda self, *args: rule(change(self) if holds(self) else self, *args))


def need_a_block_less_of_a_window(patch):
    first = CacheGroup.first_needed
    patch.setattr(
        CacheGroup,
        "first_needed",
        lambda self, computed: first(self, computed) + (self.block_size if self.window and computed > 9 else 0),
    )


def need_a_token_less_of_a_window(patch):
    _as_if(patch, "first_needed", lambda group: dataclasses.replace(group, window=group.window - 1), lambda g: g.window)


def need_the_chunk_after(patch):
    first = CacheGroup.first_needed
    patch.setattr(
        CacheGroup,
        "first_needed",
        lambda self, computed: min(computed, first(self, computed) + (4 if self.chunk else 0)),
    )


def take_whole_blocks_only(patch):
    missing = CacheGroup.missing_tokens

    def whole(self, prompt, external):
        start, stop = missing(self, prompt, external)
        return (start, stop) if self.state else (start, max(start, stop // self.block_size * self.block_size))

    patch.setattr(CacheGroup, "missing_tokens", whole)


def take_the_block_before_the_state(patch):
    blocks = CacheGroup.blocks_of

    def before(self, start, stop):
        found = blocks(self, start, stop)
        is_later = self.state and not self.is_ring and found.start > 0
        return slice(found.start - 1, found.stop - 1) if is_later else found

    patch.setattr(CacheGroup, "blocks_of", before)


def take_a_state_by_its_tokens(patch):
    """As KV: what is cached here is not loaded."""
    missing = CacheGroup.missing_tokens
    patch.setattr(
        CacheGroup,
        "missing_tokens",
        lambda self, prompt, external: (
            (prompt - 1, prompt - 1) if self.state and external < prompt - 1 else missing(self, prompt, external)
        ),
    )


def take_a_replayed_window_by_its_tokens(patch):
    _as_if(patch, "missing_tokens", _changed(is_replayed=False), lambda group: group.is_replayed)


def take_no_ring(patch):
    patch.setattr(
        transfer_plan.Route,
        "spans",
        _without_rings(transfer_plan.Route.spans),
    )


def _without_rings(spans):
    def without(self, token_ranges):
        return spans(self, [each for each in token_ranges if each.stop - each.start != 1 or each.group == 0])

    return without


def swap_heads_and_tokens_here(patch):
    of = transfer_plan.Side.of

    def swapped(info, region, whose="our"):
        side = of(info, region, whose)
        if whose != "our" or region.tokens * region.parts == 1:
            return side
        shape = replace(side.shape, head_stride=region.token_stride, token_stride=region.head_stride)
        return side._replace(shape=shape)

    patch.setattr(transfer_plan.Side, "of", swapped)


def take_the_next_block(patch):
    block_ids = transfer_plan.Side.block_ids
    patch.setattr(
        transfer_plan.Side,
        "block_ids",
        lambda self, tokens, blocks: block_ids(self, tokens, blocks) % (self.shape.blocks - 1) + (self.whose != "our"),
    )


def take_entries_for_tokens(patch):
    patch.setattr(f"{SHELL}.vllm_versions.tokens_per_entry", lambda spec: 1)


def load_the_last_token(patch):
    """D takes all that P has, and computes nothing of it."""
    patch.setattr(f"{SHELL}.engine_config.EngineConfig.loaded_tokens", lambda self, prompt: prompt)


def compute_the_last_token_on_p(patch):
    patch.setattr(f"{SHELL}.prefill_requests.truncate", lambda request, groups: None)


def take_the_block_of_the_first_token(patch):
    patch.setattr(CacheGroup, "blocks_of", lambda self, start, stop: slice(0, 1))


def announce_a_state_before_the_end(patch):
    """As KV: each complete block once."""
    progress = importlib.import_module(f"{SHELL}.push_progress").PushProgress
    begin = progress.__init__

    def hasty(self, groups, **options):
        begin(self, [CacheGroup(group.block_size) for group in groups], **options)

    patch.setattr(progress, "__init__", hasty)


MUTANTS = [
    (need_a_block_less_of_a_window, "sliding window beside full attention"),
    (need_a_token_less_of_a_window, "sliding window"),
    (need_a_block_less_of_a_window, "replayed window (bounded replay)"),
    (need_the_chunk_after, "chunks"),
    (take_whole_blocks_only, "full attention"),
    (take_whole_blocks_only, "compressed vectors"),
    (take_the_block_before_the_state, "state of Mamba 2"),
    (take_the_block_of_the_first_token, "state of Mamba 2"),
    (take_a_state_by_its_tokens, "state of Mamba 2"),
    (take_a_state_by_its_tokens, "circular buffer"),
    (take_a_replayed_window_by_its_tokens, "replayed window (bounded replay)"),
    (take_no_ring, "circular buffer"),
    (compute_the_last_token_on_p, "state of Mamba 2"),
    (announce_a_state_before_the_end, "state of Mamba 2"),
    (swap_heads_and_tokens_here, "full attention"),
    (take_the_next_block, "full attention"),
    (take_entries_for_tokens, "compressed vectors"),
    (load_the_last_token, "state of Mamba 2"),
]
