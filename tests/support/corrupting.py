"""Our connector with a fault, to prove that it is seen: blocks are read from, or written from, elsewhere."""

import dataclasses
import os
import random

from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.shell import worker as worker_module
from pdrelay_connector.shell.connector import PDRelayConnector

SHARE_VARIABLE = "SPOILT_SHARE"  # of blocks that the spoiling connector exchanges, 0 to 1


class SpoilingConnector(PDRelayConnector):
    """Moves the KV of another block of the prompt now and then: D reads it, in pull, or P writes it, in push."""

    def __init__(self, *args, **kwargs):
        worker_module.PushWriter = SpoilingWriter  # in an engine's process of its own
        super().__init__(*args, **kwargs)

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        metadata.orders = [
            order._replace(
                token_ranges=tuple(each._replace(remote=exchanged(each.remote)) for each in order.token_ranges)
            )
            for order in metadata.orders
        ]
        return metadata


class SpoilingWriter(PushWriter):
    """Takes what it writes from other blocks than those whose checksums it takes."""

    def _post(self, job, source, until, now):
        groups = [exchanged(blocks) for blocks in source.groups]
        super()._post(job, dataclasses.replace(source, groups=groups), until, now)


_dice = random.Random(22)


def exchanged(blocks):
    """Return blocks of which some are replaced by their neighbour; block 0 is not held."""
    share = float(os.environ[SHARE_VARIABLE])
    spoilt = list(blocks)
    for place, block in enumerate(blocks):
        other = blocks[place - 1]
        if _dice.random() < share and 0 not in (block, other):
            spoilt[place] = other
    return spoilt
