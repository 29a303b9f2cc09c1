"""Our connector in an engine whose step can be made to last: what a very long forward pass does to leases."""

import os
import time

from support.legs import STALL_SECONDS, STALL_TOKENS
from xpyd_connector.shell.connector import XpydConnector


class StallingConnector(XpydConnector):
    """Sleeps on the engine thread, as a forward pass of that length would keep it."""

    def build_connector_meta(self, scheduler_output):
        if any(len(new.prompt_token_ids or ()) == STALL_TOKENS for new in scheduler_output.scheduled_new_reqs):
            time.sleep(float(os.environ[STALL_SECONDS]))
        return super().build_connector_meta(scheduler_output)
