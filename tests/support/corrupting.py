"""Our connector with one fault, to prove that the end-to-end comparison sees it: one block is read from elsewhere."""

from xpyd_connector.shell.connector import XpydConnector


class CorruptingConnector(XpydConnector):
    """Swaps P's blocks: the first block of every load is read from where the last one is, of each KV cache group."""

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        metadata.orders = [
            order._replace(token_ranges=tuple(map(_spoilt, order.token_ranges))) for order in metadata.orders
        ]
        return metadata


def _spoilt(token_range):
    return token_range._replace(remote=[token_range.remote[-1], *token_range.remote[1:]])
