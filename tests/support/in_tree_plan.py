"""Which blocks vLLM's own NixlConnector would move for a request: its scheduler's and its worker's code, not run."""

import warnings
from types import SimpleNamespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_representative_spec_type
    from vllm.v1.kv_cache_interface import MambaSpec


class InTreePlan:
    """The plan of two engines whose blocks are of one size."""

    is_known = hasattr(NixlPullConnectorScheduler, "_prefill_backoff")  # from vLLM 0.31 on

    def __init__(self, config, cache, lookahead):
        self._scheduler = NixlPullConnectorScheduler(config, "in-tree", cache)
        self._scheduler.vllm_config = SimpleNamespace(num_prefill_lookahead_tokens=lookahead)
        worker = self._worker = object.__new__(NixlBaseConnectorWorker)
        worker._group_spec_types = [
            get_representative_spec_type(group.kv_cache_spec) for group in cache.kv_cache_groups
        ]
        worker._has_mamba = MambaSpec in worker._group_spec_types

    @property
    def left_out_tokens(self):
        """Of the prompt's last tokens, those that P does not compute."""
        return self._scheduler._prefill_backoff()

    def lent(self, tables, groups, prompt):
        """Return which blocks of a prefill P names; as in :meth:`taken`, the last one may be -1."""
        named = [list(ids) for ids in tables]
        if not self.left_out_tokens:
            for ids, group in zip(named, groups, strict=True):
                ids += [-1] * (self._blocks(group, prompt) - len(ids))
        return [list(ids) for ids in self._scheduler.get_exchange_clipped_blocks(named)]

    @staticmethod
    def _blocks(group, tokens):
        return 1 if group.is_ring else -(-tokens // group.block_size)

    def taken(self, blocks, tables, groups, prompt):
        """Return which of the blocks that vLLM has allocated for a load D fills.

        Without a back-off it has vLLM allocate for the last prompt token, too: that block, if it is one more, is -1.
        """
        filled = [list(ids) for ids in blocks.get_unhashed_block_ids_all_groups()]
        if not self.left_out_tokens:
            for ids, table, group in zip(filled, tables, groups, strict=True):
                first = 0 if group.is_ring else group.first_needed(prompt) // group.block_size
                ids[:] = [block for block in ids if table.index(block) >= first]
                ids += [-1] * (self._blocks(group, prompt) - len(table))
        return [list(each) for each in self._scheduler.get_exchange_clipped_blocks(filled)]

    def pairs(self, taken, lent):
        """Return (group, P's block, D's block) of everything that moves."""
        ours, theirs = self._worker._apply_prefix_caching(taken, lent, 1, 1)
        return [
            (group, remote, local)
            for group, (locals_, remotes) in enumerate(zip(ours, theirs, strict=True))
            for remote, local in zip(remotes, locals_, strict=bool(locals_))  # it trims to no block with [-0:]
            if -1 not in (remote, local)
        ]

    def pairs_of_rank(self, taken, lent, tables, shapes, rank):
        """Return (P's rank, group, P's block, D's block) of what a rank of D reads where ranks divide contexts.

        ``shapes``: P's and D's, whose caches are latent vectors, or states. As ``_read_blocks_for_req`` of its
        ``pull_worker.py``.
        """
        p, d = shapes
        topology = TransferTopology(rank, d.ranks, 4, "d", True, False, 1, [], dcp_size=d.shards)
        mapping = compute_tp_mapping(topology, p.ranks, tuple(self._worker._group_spec_types), p.shards)
        found = []
        for source in mapping.all_source_ranks:
            for group, (ours, theirs) in enumerate(zip(taken, lent, strict=True)):
                if source not in mapping.source_ranks_per_group[group]:
                    continue
                locals_, remotes = ours, theirs
                if self._worker._group_spec_types[group] is not MambaSpec:
                    hits = len([block for block in tables[group] if block not in ours])
                    locals_, remotes = self._worker._apply_dcp_prefix_caching(
                        ours, theirs, source, d.shards, rank % d.shards, p.shards, hits
                    )
                found += [
                    (source, group, remote, local)
                    for remote, local in zip(remotes, locals_, strict=False)
                    if -1 not in (remote, local)
                ]
        return found
