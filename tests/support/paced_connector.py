"""Our connector in an engine whose steps last (``support.pacing``)."""

import os
import time

from support.pacing import PACE
from xpyd_connector.shell.connector import XpydConnector


class Pace:
    """When the present step may be over: the scheduler sets it, the worker waits for it, both on one thread."""

    until = 0.0


class PacedConnector(XpydConnector):
    """Sleeps behind the forward pass, before its tokens are shown."""

    def build_connector_meta(self, scheduler_output):
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
