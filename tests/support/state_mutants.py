"""Rules of models that keep a state, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

As in ``support.pull_mutants``; ``shell/test_states.py`` and ``push/test_states.py`` show that each of these is noticed.
Modules that import vLLM are named, so that tests of the core need no vLLM.
"""

import importlib

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.push import prefill_worker
from pdrelay_connector.core.push.prefill_worker import PushWriter

SHELL = "pdrelay_connector.shell"


def compute_the_last_token_on_p(patch):
    patch.setattr(f"{SHELL}.prefill_requests.truncate", lambda request, groups: None)


def digest_the_last_token(patch):
    real = importlib.import_module(f"{SHELL}.decode_modes").digest
    patch.setattr(f"{SHELL}.decode_modes.digest", lambda request, tokens: real(request, request.num_prompt_tokens))


def hand_over_what_has_its_last_token(patch):
    patch.setattr(f"{SHELL}.prefill_requests.can_move", lambda request, groups: True)


def take_any_state(patch):
    patch.setattr(f"{SHELL}.decode_modes._check_state", lambda blocks, covered, computed: None)


def take_the_block_of_the_first_token(patch):
    patch.setattr(CacheGroup, "blocks_of", lambda self, start, stop: slice(0, 1))


def take_all_blocks(patch):
    patch.setattr(CacheGroup, "blocks_of", lambda self, start, stop: slice(0, -(-stop // self.block_size)))


def take_the_state_at_a_hit(patch):
    """As KV: what is cached here is not loaded, and nothing else is."""
    patch.setattr(
        CacheGroup, "missing_tokens", lambda self, prompt, external: (prompt - 1 - external, prompt - 1 - external)
    )


def announce_a_state_before_the_end(patch):
    """As KV: each complete block once."""
    progress = importlib.import_module(f"{SHELL}.push_progress").PushProgress
    begin = progress.__init__

    def hasty(self, groups, **options):
        begin(self, [CacheGroup(group.block_size) for group in groups], **options)

    patch.setattr(progress, "__init__", hasty)


def hit_kv_before_a_window(patch):
    patch.setattr(CacheGroup, "frees_early", property(lambda self: False, doc=CacheGroup.frees_early.__doc__))


def let_vllm_zero_what_is_loaded(patch):
    patch.setattr(f"{SHELL}.connector.PDRelayConnector.get_loaded_kv_cache_group_ids", lambda self, request: ())


def let_unlike_states_meet(patch):
    patch.setattr(f"{SHELL}.engine_config._state", lambda spec: spec.mamba_type.name)


def refuse_no_state(patch):
    patch.setattr(f"{SHELL}.engine_config._check_state", lambda layer, spec: None)


def write_the_state_with_every_part(patch):
    patch.setattr(
        prefill_worker,
        "_state",
        lambda group, lent, until, blocks: TokenRange(group, lent.start, lent.stop, lent.blocks, blocks),
    )


def forget_the_state_of_a_prompt_that_ends_with_a_block(patch):
    writable = PushWriter._writable

    def hasty(self, job, source):
        states, self._states = self._states, set()
        try:
            return writable(self, job, source)
        finally:
            self._states = states

    patch.setattr(PushWriter, "_writable", hasty)


def write_a_state_of_more_tokens(patch):
    patch.setattr(PushWriter, "_objection", lambda self, job, source: "")
