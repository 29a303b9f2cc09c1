"""Rules that are turned off in the source: a line is another one, and a test must fail.

``python -P tests/support/source_mutants.py`` imports vLLM once, has a fork of itself run the tests of each rule against
a copy of the source with the other line, and prints which rules no test has noticed. Rules of the protocols, which are
tried in every order of events, are turned off in ``support.pull_mutants`` and its neighbours instead.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL, CORE = "connector/pdrelay_connector/shell", "connector/pdrelay_connector/core"
UNIT = "tests/connector/shell"
REWRITE = "ignore::pytest.PytestAssertRewriteWarning"  # of what vLLM has imported
NOTICED = 1  # pytest's exit code if tests have failed; others say that none was found, or that it was interrupted


@dataclass(frozen=True)
class Mutant:
    """One rule: its lines, of which ``rule`` occurs once, what stands there instead, and the test that notices."""

    file: str
    rule: str
    instead: str
    test: str


MUTANTS = {
    "a heartbeat that is looked at late counts": Mutant(
        f"{CORE}/lease/lease_table.py",
        "        if lease is None:\n            return False\n        if lease.holder is not None and not",
        "        if lease is None or lease.expires_at <= now:\n            return False\n"
        "        if lease.holder is not None and not",
        "tests/connector/core/lease/test_lease_table.py::test_a_renewal_that_is_seen_late_keeps_what_has_not_expired_yet",
    ),
    "of n answers one loads": Mutant(
        f"{SHELL}/decode_requests.py",
        "        if prompt in self._loaders and (loader is None or _is_same_prompt(request, loader)):",
        "        if False:",
        f"{UNIT}/test_scheduler.py::test_the_answers_of_one_prompt_share_a_load",
    ),
    "the others wait for its load": Mutant(
        f"{SHELL}/decode_requests.py",
        "            return (None, False) if self._awaits_other(own) else (0, False)",
        "            return (0, False)",
        f"{UNIT}/test_scheduler.py::test_the_answers_of_one_prompt_share_a_load",
    ),
    "nobody waits for one that loads nothing": Mutant(
        f"{SHELL}/decode_requests.py",
        "            del self._loaders[prompt]\n",
        "            pass\n",
        f"{UNIT}/test_scheduler.py::test_an_answer_does_not_wait_for_one_that_loads_nothing",
    ),
    "a prompt that ends with P's token is loaded up to it": Mutant(
        f"{SHELL}/decode_modes.py",
        "digest(request, source.remote_num_tokens)",
        "digest(request, request.num_prompt_tokens)",
        f"{UNIT}/test_scheduler.py::test_a_prompt_with_the_token_that_p_has_made_is_loaded_up_to_it",
    ),
    "the KV of another LoRA adapter is another prompt's": Mutant(
        f"{SHELL}/decode_modes.py",
        "    if (adapter := adapter_of(request)) is not None:",
        "    if (adapter := None) is not None:",
        f"{UNIT}/test_scheduler.py::test_the_digest_of_a_prompt_covers_its_adapter",
    ),
    "the KV of other images is another prompt's": Mutant(
        f"{SHELL}/decode_modes.py",
        "[feature.identifier for feature in request.mm_features]",
        "[]",
        f"{UNIT}/test_scheduler.py::test_the_same_tokens_with_other_inputs_are_another_prompt",
    ),
    "a state's token is not shown": Mutant(
        f"{SHELL}/first_token.py",
        " or any(group.state for group in groups)",
        "",
        f"{UNIT}/test_first_token.py",
    ),
    "defaults that look back are heeded": Mutant(
        f"{SHELL}/first_token.py",
        "model.logits_processors or _LOOK_BACK & model.get_diff_sampling_param().keys()",
        "model.logits_processors",
        f"{UNIT}/test_first_token.py",
    ),
    "two versions of vLLM never meet": Mutant(
        f"{SHELL}/fingerprint.py",
        "        vllm=VLLM_VERSION,",
        '        vllm="",',
        f"{UNIT}/test_fingerprint.py::test_two_versions_of_vllm_differ",
    ),
    "a draft's KV is a part of the KV": Mutant(
        f"{SHELL}/fingerprint.py",
        "workers, draft_model=_draft_model(config), ",
        "workers, draft_model=NONE, ",
        f"{UNIT}/test_fingerprint.py::test_draft_models_with_other_kv_differ",
    ),
    "drafts without KV may differ": Mutant(
        f"{SHELL}/fingerprint.py",
        " or not speculative.uses_draft_kv_cache()",
        "",
        f"{UNIT}/test_fingerprint.py::test_what_leaves_the_kv_alone_may_differ",
    ),
    "a revision is its commit": Mutant(
        f"{SHELL}/model_files.py",
        'getattr(model.revision, "resolved", None) or ',
        "",
        f"{UNIT}/test_fingerprint.py::test_two_revisions_of_a_model_without_files_differ",
    ),
    "what a model changes while it is loaded does not matter": Mutant(
        f"{SHELL}/model_config.py",
        "        config: Any = _parse(model, folder)",
        "        config: Any = model.hf_config",
        f"{UNIT}/test_model_config.py::test_what_a_model_changes_while_it_is_loaded_does_not_matter",
    ),
    "groups of another kind are another cache": Mutant(
        f"{SHELL}/fingerprint.py",
        '        groups=", ".join(_kind(group) for group in engine_config.groups),\n',
        "",
        f"{UNIT}/test_fingerprint.py::test_groups_of_another_kind_differ",
    ),
    "stages are not staged, and keep no state": Mutant(
        f"{SHELL}/engine_config.py",
        "    if engine_config.stages == 1:",
        "    if engine_config.stages >= 1:",
        f"{UNIT}/test_engine_config.py::test_pipeline_stages_have_limits",
    ),
    "an engine that may sleep is refused": Mutant(
        f"{SHELL}/engine_config.py",
        "    if config.model_config.enable_sleep_mode:",
        "    if False:",
        f"{UNIT}/test_engine_config.py::test_an_engine_that_may_sleep_is_refused",
    ),
    "an engine that returns experts is refused": Mutant(
        f"{SHELL}/engine_config.py",
        "    if vllm_versions.returns_routed_experts(config):",
        "    if False:",
        f"{UNIT}/test_engine_config.py::test_an_engine_that_returns_routed_experts_is_refused",
    ),
    "the switch of experts is where a version has it": Mutant(
        f"{SHELL}/vllm_versions.py",
        'getattr(config, "aux_output_config", config.model_config)',
        "config.model_config",
        f"{UNIT}/test_engine_config.py::test_an_engine_that_returns_routed_experts_is_refused",
    ),
    "ranks that step together do not wait": Mutant(
        f"{SHELL}/engine_config.py",
        "        steps_independently=config.parallel_config.data_parallel_size == 1,\n",
        "",
        f"{UNIT}/test_engine_config.py::test_what_vllm_says_of_an_engine",
    ),
    "each data-parallel rank has a port": Mutant(
        f"{SHELL}/engine_config.py",
        "settings.port + config.parallel_config.data_parallel_index",
        "settings.port",
        f"{UNIT}/test_engine_config.py::test_what_vllm_says_of_an_engine",
    ),
    "MLA has one head on all ranks": Mutant(
        f"{SHELL}/engine_config.py",
        "1 if model.use_mla else model.get_total_num_kv_heads()",
        "model.get_total_num_kv_heads()",
        f"{UNIT}/test_engine_config.py::test_what_vllm_says_of_an_engine",
    ),
    "a window keeps what a draft looks back at": Mutant(
        f"{SHELL}/engine_config.py",
        "one.sliding_window + retained",
        "one.sliding_window",
        "tests/contract/test_cache_groups.py",
    ),
    "a window is read with its size": Mutant(
        f"{SHELL}/engine_config.py",
        "one.sliding_window + retained if isinstance(one, SlidingWindowSpec) else 0",
        "0",
        "tests/contract/test_cache_groups.py",
    ),
    "a chunk is read with its size": Mutant(
        f"{SHELL}/engine_config.py",
        "one.attention_chunk_size if isinstance(one, ChunkedLocalAttentionSpec) else 0",
        "0",
        "tests/contract/test_cache_groups.py",
    ),
    "what another connector describes is not moved": Mutant(
        f"{SHELL}/connector.py",
        "        if not ours:",
        "        if False:",
        "tests/contract/test_multi_connector.py",
    ),
    "a layer that uses another's cache is moved once": Mutant(
        f"{SHELL}/cache_regions.py",
        "    return own\n",
        "    return dict(caches)\n",
        f"{UNIT}/test_cache_regions.py::test_a_layer_that_uses_anothers_cache_is_moved_with_that",
    ),
    "a kernel's blocks may be smaller": Mutant(
        f"{SHELL}/cache_regions.py",
        "        rows=rows,\n",
        "",
        f"{UNIT}/test_cache_regions.py::test_a_block_may_consist_of_several_of_the_kernel",
    ),
    "heads that are not KV heads are not cut": Mutant(
        f"{SHELL}/cache_regions.py",
        "opaque=not is_cut or region.heads != heads",
        "opaque=not is_cut",
        f"{UNIT}/test_cache_regions.py",
    ),
    "an unknown kernel's blocks are not cut": Mutant(
        f"{SHELL}/kernel_layout.py",
        "(backends and backends <= ENTRIES)",
        "(backends and backends & ENTRIES)",
        f"{UNIT}/test_kernel_layout.py::test_one_kernel_that_we_do_not_know_makes_all_opaque",
    ),
    "MLA's blocks are entries": Mutant(
        f"{SHELL}/kernel_layout.py",
        "config.model_config.use_mla or ",
        "",
        f"{UNIT}/test_kernel_layout.py::test_mla_has_one_vector_for_each_token_whatever_the_kernel",
    ),
    "a CPU's fp8 cache is not cut": Mutant(
        f"{SHELL}/kernel_layout.py",
        ' and str(cache.cache_dtype) == "auto"',
        "",
        f"{UNIT}/test_kernel_layout.py::test_a_cpu_cache_of_another_type_than_the_model_is_opaque",
    ),
    "states have no say in the kernel": Mutant(
        f"{SHELL}/kernel_layout.py",
        " if not backend.is_ssm()",
        "",
        f"{UNIT}/test_kernel_layout.py::test_layers_that_keep_a_state_have_no_say",
    ),
    "windows of prefills are pinned": Mutant(
        f"{SHELL}/sliding_windows.py",
        "            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:",
        "            if False:",
        f"{UNIT}/test_sliding_windows.py::test_every_block_that_a_decode_engine_needs_is_lent",
    ),
    "only windows of prefills are pinned": Mutant(
        f"{SHELL}/sliding_windows.py",
        'request is None or not (request.kv_transfer_params or {}).get("do_remote_decode")',
        "request is None",
        f"{UNIT}/test_sliding_windows.py::test_only_prefills_for_others_are_pinned",
    ),
    "the prompt's window is pinned, not the answer's": Mutant(
        f"{SHELL}/sliding_windows.py",
        "        if pinned is not None and pinned.attempt == attempt:\n            return",
        "        if pinned is not None and pinned.attempt == attempt:\n            self.release(own)",
        f"{UNIT}/test_sliding_windows.py::test_a_request_that_is_computed_further_keeps_the_window_of_its_prompt",
    ),
    "a preempted attempt gives its pins back": Mutant(
        f"{SHELL}/sliding_windows.py",
        "            if own not in live or live[own].num_preemptions != pinned.attempt:",
        "            if own not in live:",
        f"{UNIT}/test_sliding_windows.py::test_a_preempted_attempt_gives_its_pins_back",
    ),
    "the connector's module registers its name": Mutant(
        f"{SHELL}/connector.py",
        "\n\nregister()\n",
        "\n",
        f"{UNIT}/test_plugin.py",
    ),
    "a name may be registered twice": Mutant(
        f"{SHELL}/plugin.py",
        "    with suppress(ValueError):",
        "    with suppress(KeyError):",
        f"{UNIT}/test_plugin.py",
    ),
    "an abandoned transfer's lease ends": Mutant(
        f"{CORE}/control.py",
        "        self.lease_manager.drop((request,))",
        "        pass",
        f"{UNIT}/test_scheduler.py::test_blocks_that_nobody_will_come_for_are_freed_at_once",
    ),
    "a prefill that was abandoned leases nothing": Mutant(
        f"{SHELL}/prefill_requests.py",
        "if transfer is not None and self._transfers.take_abandoned(transfer):",
        "if False:",
        f"{UNIT}/test_scheduler.py::test_a_prefill_that_was_abandoned_before_its_end_leases_nothing",
    ),
    "a tenant's salt is part of what is looked up": Mutant(
        f"{SHELL}/prefix_hashes.py",
        "            cache_salt=message.salt,",
        "            cache_salt=None,",
        f"{UNIT}/test_cached_prefixes.py::test_hashes_are_vllms_own",
    ),
    "what is looked up has no gaps": Mutant(
        f"{SHELL}/cached_prefixes.py",
        "            if blocks is None:\n                break",
        "            if blocks is None:\n                continue",
        f"{UNIT}/test_cached_prefixes.py::test_only_a_beginning_without_gaps_is_found",
    ),
    "what a step may still compute is not named": Mutant(
        f"{SHELL}/cached_prefixes.py",
        "self._pinned[0].step <= self._ended",
        "self._pinned[0].step",
        f"{UNIT}/test_cached_prefixes.py::test_the_answer_waits_for_the_steps_that_may_still_compute",
    ),
    "a step counts before it is looked up in": Mutant(
        f"{SHELL}/scheduler.py",
        "        number = self._cached.scheduled(output, now=self._clock())"
        "  # before a look-up finds what this step computes\n"
        "        self.handle_results()\n        self._cached.look_up()\n",
        "        self.handle_results()\n        self._cached.look_up()\n"
        "        number = self._cached.scheduled(output, now=self._clock())\n",
        f"{UNIT}/test_scheduler.py::test_a_look_up_in_a_step_waits_for_that_step",
    ),
    "an engine whose failed loads end requests asks no other": Mutant(
        f"{SHELL}/returned_prefixes.py",
        "bool(engine_config.prefix_hash) and engine_config.recomputes",
        "bool(engine_config.prefix_hash)",
        f"{UNIT}/test_cached_prefixes.py::test_an_engine_on_which_a_failed_load_ends_its_request_asks_nobody",
    ),
    "an engine says for itself alone where it listens": Mutant(
        f"{CORE}/cached_prefix/prefill_scheduler.py",
        "        engine = self._link.engine_of(conn)\n",
        "        engine = next(iter(self._engines), self._link.engine_of(conn))\n",
        "tests/connector/core/cached_prefix/test_returned_prefix.py::test_an_engine_speaks_for_itself_alone",
    ),
    "the lease of cached blocks is the asker's": Mutant(
        f"{CORE}/cached_prefix/decode_scheduler.py",
        "            self._lease_manager.renew(question.conn, (lease,), now=now)",
        "            pass",
        "tests/connector/core/cached_prefix/test_returned_prefix.py::test_a_lease_ends_with_the_connection_that_has_asked",
    ),
    "what nobody here waits for is given back": Mutant(
        f"{CORE}/cached_prefix/prefill_scheduler.py",
        "search.state is not SearchState.ASKED:\n            if answer.lease:\n",
        "search.state is not SearchState.ASKED:\n            if False:\n",
        "tests/connector/core/cached_prefix/test_returned_prefix.py::test_an_answer_that_comes_too_late_is_given_back",
    ),
    "only our scheduler has a worker write": Mutant(
        f"{CORE}/returning_writer.py",
        "(self._writer if self._writer.owns(event.conn) else self._reader)",
        "self._writer",
        "tests/connector/core/test_returning_writer.py::test_only_our_scheduler_can_have_us_write",
    ),
    "what goes back is read in push, too": Mutant(
        f"{CORE}/control.py",
        "        elif self._prefix_lender is not None:",
        "        elif self._prefix_lender is not None and self._push_coordinator is None:",
        "tests/connector/core/cached_prefix/test_returned_prefix.py::test_p_reads_what_d_has_computed",
    ),
    "an engine that reads steps without waiting": Mutant(
        f"{SHELL}/decode_requests.py",
        "        if any(isinstance(source, PullParams) for source in loading):",
        "        if False:",
        f"{UNIT}/test_cached_prefixes.py::test_an_engine_that_reads_steps_without_waiting",
    ),
    "a long prompt is hashed in pieces": Mutant(
        f"{SHELL}/prefix_hashes.py",
        "request.num_tokens + max(PIECE, block_size)",
        "len(tokens)",
        f"{UNIT}/test_cached_prefixes.py::test_a_long_prompt_is_hashed_in_pieces",
    ),
    "a chunk begins at its own first token": Mutant(
        f"{CORE}/layout/cache_groups.py",
        "computed // self.chunk * self.chunk if self.chunk else 0",
        "max(0, computed - self.chunk + 1) if self.chunk else 0",
        "tests/connector/core/layout/test_cache_groups.py",
    ),
}


def unnoticed(names):
    """Return those of the named rules that no test has missed, or whose lines are no longer there."""
    with tempfile.TemporaryDirectory() as folder:
        for top in ("connector", "proxy"):
            shutil.copytree(ROOT / top, Path(folder, top), ignore=shutil.ignore_patterns("__pycache__"))
        return [name for name in names if not _notices(MUTANTS[name], Path(folder))]


def _notices(mutant, folder):
    file = folder / mutant.file
    source = file.read_text()
    if source.count(mutant.rule) != 1:
        return False
    file.write_text(source.replace(mutant.rule, mutant.instead))
    try:
        return _exit_code_of_fork(mutant.test, folder) == NOTICED
    finally:
        file.write_text(source)


def _exit_code_of_fork(test, folder):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = os.EX_SOFTWARE
    try:
        sys.path[:0] = [f"{folder}/connector", f"{folder}/proxy"]
        sys.dont_write_bytecode = True
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", REWRITE, f"--rootdir={ROOT}"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = pytest.main([*options, str(ROOT / test)])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def main(names):
    """Try the named rules, or all; the exit code says how many were not noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
        import vllm.v1.core.sched.scheduler  # noqa: F401 -- for all forks; nothing of ours may be there yet
    missed = unnoticed(names or list(MUTANTS))
    for name in missed:
        print(name)
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
