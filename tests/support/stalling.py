"""Our connector in an engine whose steps can be made to last: what a very long forward pass does to leases.

Some prompts do it, by their length: one of ``STALL_TOKENS`` keeps its first step for long; one of ``SLOW_TOKENS``, or
of hundreds more, keeps every step a little, so that an answer takes its time without taking the CPU.
"""

import os
import time

from pdrelay_connector.shell.connector import PDRelayConnector
from support.legs import SLOW_SECONDS, SLOW_TOKENS, STALL_SECONDS, STALL_TOKENS


class StallingConnector(PDRelayConnector):
    """Sleeps on the engine thread, as a forward pass of that length would keep it."""

    _slow = frozenset()

    def build_connector_meta(self, scheduler_output):
        lengths = {new.req_id: len(new.prompt_token_ids or ()) for new in scheduler_output.scheduled_new_reqs}
        if STALL_TOKENS in lengths.values():
            time.sleep(float(os.environ[STALL_SECONDS]))
        self._slow |= {request for request, length in lengths.items() if length % 100 == SLOW_TOKENS}
        self._slow -= scheduler_output.finished_req_ids
        if self._slow & scheduler_output.num_scheduled_tokens.keys():
            time.sleep(SLOW_SECONDS)
        return super().build_connector_meta(scheduler_output)
