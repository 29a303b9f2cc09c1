"""The connectors under test, in engines that say when a prompt was prefilled and when its KV had
arrived.

The engines load them from here under their own names, so that vLLM treats them as what they are.
Every line of the file ``PDRELAY_BENCH_STAMPS`` is one event: its name, its time on the monotonic
clock (one clock for all processes of a machine, network namespaces included) and vLLM's id of the
request.
"""

import json
import os
import time

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl

from pdrelay_connector.shell import connector as pdrelay

FILE = os.open(os.environ["PDRELAY_BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
PREFILLED, RUNNABLE = "prefilled", "runnable"


class _Stamped:
    """Both events are taken on the scheduler's side: the last token of the prompt is computed, the
    KV can be used.
    """

    def request_finished(self, request, block_ids):
        self._stamp_prefilled(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request, block_ids):
        self._stamp_prefilled(request)
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        for request in connector_output.finished_recving or ():
            _stamp(RUNNABLE, request)

    def _stamp_prefilled(self, request):
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            _stamp(PREFILLED, request.request_id)


class PDRelayConnector(_Stamped, pdrelay.PDRelayConnector):
    """Ours."""


class NixlConnector(_Stamped, nixl.NixlConnector):
    """vLLM's, where the decode engine reads."""


class NixlPushConnector(_Stamped, nixl.NixlPushConnector):
    """vLLM's, where the prefill engine writes the whole prompt once it is computed."""


class _Loaded(KVConnectorMetadata):
    """The requests that say in this step that they are loaded."""

    def __init__(self, requests):
        self.requests = requests


class LoadsAtOnce(KVConnectorBase_V1):
    """Loads nothing, and says in the same step that it has: what vLLM's own part of an asynchronous
    load costs. What is in the blocks is anything.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._ordered = []
        self._known = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or request.request_id in self._known:
            return 0, False
        return request.num_prompt_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens and request.request_id not in self._known:
            self._known.add(request.request_id)
            self._ordered.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        ordered = self._ordered
        self._ordered = []
        return _Loaded(ordered)

    def request_finished(self, request, block_ids):
        self._known.discard(request.request_id)
        return False, None

    def get_finished(self, finished_req_ids):
        return None, set(self._get_connector_metadata().requests)

    def start_load_kv(self, forward_context, **kwargs):
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name):
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Nothing is saved."""

    def wait_for_save(self):
        """Nothing is saved."""


def _stamp(event, request):
    os.write(FILE, json.dumps([event, time.monotonic(), request]).encode() + b"\n")
