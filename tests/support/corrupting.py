"""Our connector with one fault, to prove that the end-to-end comparison sees it: one block is read from elsewhere."""

from xpyd_connector.shell.connector import XpydConnector


class CorruptingConnector(XpydConnector):
    """Reads P's block 0, which vLLM never gives to a request, in place of the first block of every load."""

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        metadata.orders = [order._replace(blocks=[0, *order.blocks[1:]]) for order in metadata.orders]
        return metadata
