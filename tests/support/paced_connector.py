"""Our connector in an engine whose steps last, and which is slow over some prompts (``support.pacing``)."""

import os
import time
from typing import ClassVar

from pdrelay_connector.core.lease.kv_params import parse_transfer_id
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import ReadDone
from pdrelay_connector.core.ports import MessageReceived
from pdrelay_connector.io.nixl import NixlTransferAgent
from pdrelay_connector.shell import control_thread, worker
from pdrelay_connector.shell.connector import PDRelayConnector
from pdrelay_proxy.core.model import Role
from support.pacing import PACE, SLOW_S, slow_row

LATER = 3  # steps of a stream before one that is slow: with asynchronous scheduling its first token is known by then


class Pace:
    """When the present step may be over: the scheduler sets it, the worker waits for it, both on one thread."""

    until = 0.0


class Slow:
    """What this engine is still to be slow over: one process has the scheduler and the worker."""

    rows: ClassVar[dict[str, str]] = {}  # by request, or by transfer
    decoded: ClassVar[dict[str, int]] = {}  # steps of a stream that is to be slow
    moves_late = False  # the next read or write

    @classmethod
    def takes(cls, request, row):
        """Tell whether this is the time to be slow, once."""
        if cls.rows.get(request) != row:
            return False
        del cls.rows[request]
        return True

    @classmethod
    def over(cls, request, row):
        """Be slow over it."""
        if cls.takes(request, row):
            time.sleep(SLOW_S)


class LateConfirming(LeaseManager):
    """Is busy with something else when a decode engine has read some prompts."""

    def on(self, event, *, now):
        if isinstance(event, MessageReceived) and isinstance(event.message, ReadDone):
            Slow.over(event.message.request, "fence")
        super().on(event, now=now)


class LateTransferAgent(NixlTransferAgent):
    """Says late of some reads and writes that they are over, as one over a slow network does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._until = 0.0
        self._kept = []

    def read(self, handle, spans):
        self._post_late()
        return super().read(handle, spans)

    def write(self, handle, spans):
        self._post_late()
        return super().write(handle, spans)

    def _post_late(self):
        if Slow.moves_late:
            Slow.moves_late, self._until = False, time.monotonic() + SLOW_S

    def poll(self):
        self._kept += super().poll()
        if time.monotonic() < self._until:
            return []
        kept = self._kept
        self._kept = []
        return kept


class PacedConnector(PDRelayConnector):
    """Sleeps behind the forward pass, before its tokens are shown, and in the hooks of some prompts."""

    def __init__(self, vllm_config, *args, **kwargs):
        # In an engine's process of its own.
        control_thread.LeaseManager, worker.NixlTransferAgent = LateConfirming, LateTransferAgent
        is_producer = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._serves = Role.PREFILL if is_producer else Role.DECODE
        super().__init__(vllm_config, *args, **kwargs)

    # ---- scheduler

    def on_new_request(self, request):
        name = request.request_id
        row = slow_row(request.prompt_token_ids or (), self._serves)
        if row == "write KV":
            Slow.rows[parse_transfer_id(request.kv_transfer_params or {}, name)] = row
        elif row is not None:
            Slow.rows[name] = row
        Slow.over(name, "API server")
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        Slow.over(request.request_id, "wait in the queue")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        Slow.over(request.request_id, "allocate blocks")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        counts = scheduler_output.num_scheduled_tokens
        for name in counts:
            Slow.over(name, "wait for a step")
        metadata = super().build_connector_meta(scheduler_output)
        if counts:
            step_s, token_s, stream_s = map(float, os.environ[PACE].split())
            # A request has one token a step as a stream; what is more than that is of its prompt.
            took = step_s + token_s * sum(count - 1 for count in counts.values()) + stream_s * len(counts)
            Pace.until = time.monotonic() + took + SLOW_S * self._slow_ones(scheduler_output)
        return metadata

    @staticmethod
    def _slow_ones(scheduler_output):
        """Return how many of a step's requests are to be slow in it."""
        count = sum(Slow.takes(name, "compute") for name in scheduler_output.num_scheduled_tokens)
        for name in scheduler_output.scheduled_cached_reqs.req_ids:
            if Slow.rows.get(name) == "decode":
                Slow.decoded[name] = Slow.decoded.get(name, 0) + 1
                if Slow.decoded[name] == LATER:
                    del Slow.decoded[name]
                    count += Slow.takes(name, "decode")
        return count

    # ---- worker

    def bind_connector_metadata(self, connector_metadata):
        if any(Slow.takes(piece.request, "write KV") for piece in connector_metadata.pieces):
            Slow.moves_late = True
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        for order in self._get_connector_metadata().orders:
            Slow.over(order.request, "order to the worker")
            if Slow.takes(order.request, "read KV"):
                Slow.moves_late = True
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self):
        super().wait_for_save()
        time.sleep(max(0.0, Pace.until - time.monotonic()))
