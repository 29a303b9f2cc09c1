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


def _stamp(event, request):
    os.write(FILE, json.dumps([event, time.monotonic(), request]).encode() + b"\n")
