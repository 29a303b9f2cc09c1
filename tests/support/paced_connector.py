"""Our connector in an engine whose steps last, and which confirms some leases late (``support.pacing``)."""

import os
import time

from support.pacing import FENCE_SECONDS, FENCE_TOKENS, PACE
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager
from xpyd_connector.core.messages import ReadDone
from xpyd_connector.core.ports import MessageReceived
from xpyd_connector.shell import control_thread
from xpyd_connector.shell.connector import XpydConnector


class Pace:
    """When the present step may be over: the scheduler sets it, the worker waits for it, both on one thread."""

    until = 0.0


_late = set()  # requests whose leases are confirmed late


class LateConfirming(LeaseManager):
    """Is busy with something else when a decode engine has read some prompts."""

    def on(self, event, *, now):
        if (
            isinstance(event, MessageReceived)
            and isinstance(event.message, ReadDone)
            and event.message.request in _late
        ):
            time.sleep(float(os.environ[FENCE_SECONDS]))
        super().on(event, now=now)


class PacedConnector(XpydConnector):
    """Sleeps behind the forward pass, before its tokens are shown."""

    def __init__(self, *args, **kwargs):
        control_thread.LeaseManager = LateConfirming  # in an engine's process of its own
        super().__init__(*args, **kwargs)

    def build_connector_meta(self, scheduler_output):
        new = scheduler_output.scheduled_new_reqs
        _late.update(each.req_id for each in new if len(each.prompt_token_ids or ()) == FENCE_TOKENS)
        counts = scheduler_output.num_scheduled_tokens.values()
        if counts:
            step_s, token_s, stream_s = map(float, os.environ[PACE].split())
            # A request has one token a step as a stream; what is more than that is of its prompt.
            took = step_s + token_s * sum(count - 1 for count in counts) + stream_s * len(counts)
            Pace.until = time.monotonic() + took
        return super().build_connector_meta(scheduler_output)

    def wait_for_save(self):
        super().wait_for_save()
        time.sleep(max(0.0, Pace.until - time.monotonic()))
