"""Rules of context parallelism, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

``shell/test_context_parallel.py`` shows that each of these is noticed.
"""

from pdrelay_connector.core.layout import transfer_plan
from pdrelay_connector.core.layout.shards import Shard

PLAN = "pdrelay_connector.core.layout.transfer_plan"
SOURCES = "pdrelay_connector.core.layout.source_ranks"


def keep_one_token_in_turn(patch):
    """Whatever vLLM's interleaving is."""
    shard_of = transfer_plan.shard_of
    patch.setattr(f"{PLAN}.shard_of", lambda *of: shard_of(*of)._replace(interleave=1))


def keep_a_block_in_turn(patch):
    shard_of = transfer_plan.shard_of

    def of_blocks(rank, region):
        return shard_of(rank, region)._replace(interleave=region.kept_tokens)

    patch.setattr(f"{PLAN}.shard_of", of_blocks)


def number_the_parts_from_the_last(patch):
    keeps, before = Shard.keeps, Shard.before
    patch.setattr(Shard, "keeps", lambda self, tokens: keeps(_turned(self), tokens))
    patch.setattr(Shard, "before", lambda self, token: before(_turned(self), token))


def _turned(shard):
    return shard._replace(rank=shard.ranks - 1 - shard.rank)


def divide_among_distant_ranks(patch):
    """As if ranks 0 and 2 of four were a group, and 1 and 3."""

    def distant(rank, region):
        return Shard(rank // region.shards % region.shards, region.shards, region.interleave)

    patch.setattr(f"{PLAN}.shard_of", distant)


def round_a_part_down(patch):
    before = Shard.before
    patch.setattr(Shard, "before", lambda self, token: before(self, token) // self.interleave * self.interleave)


def read_of_one_rank(patch):
    """As of latent vectors that each rank has."""
    patch.setattr(f"{SOURCES}.shards_in_common", lambda number, here, part: range(part % number, part % number + 1))


def read_of_the_first_copies(patch):
    patch.setattr(f"{SOURCES}.shards_in_common", lambda number, here, part: range(min(number, 1)))


def take_rows_where_parts_differ(patch):
    """As if a row of one side were one of the other."""
    patch.setattr(f"{PLAN}._unit", lambda their, our: min(their.shape.tokens, our.shape.tokens) * our.shape.covers)


def take_places_for_tokens(patch):
    patch.setattr(Shard, "places", lambda self, tokens: tokens)


def take_tokens_of_any_rank(patch):
    patch.setattr(Shard, "keeps", lambda self, tokens: tokens >= 0)


def take_no_block_for_larger(patch):
    """A block of a table is for as many tokens as one rank keeps in it."""
    patch.setattr("pdrelay_connector.shell.vllm_versions.is_divided", lambda spec: False)


MUTANTS = [
    (keep_one_token_in_turn, "four parts to two"),
    (keep_one_token_in_turn, "smaller blocks of the kernel"),
    (keep_a_block_in_turn, "four parts to two, one token in turn"),
    (keep_a_block_in_turn, "latent vectors, one token in turn"),
    (number_the_parts_from_the_last, "latent vectors, one token in turn"),
    (number_the_parts_from_the_last, "two parts to one"),
    (divide_among_distant_ranks, "latent vectors, each part twice"),
    (divide_among_distant_ranks, "two parts, each twice, to four"),
    (round_a_part_down, "latent vectors, four ranks, half a block in turn"),
    (read_of_one_rank, "two parts to one"),
    (read_of_the_first_copies, "two parts to four"),
    (take_rows_where_parts_differ, "four parts to two, one token in turn"),
    (take_places_for_tokens, "one to two parts"),
    (take_tokens_of_any_rank, "two parts to one"),
    (take_no_block_for_larger, "latent vectors"),
]
