"""Our connector on a machine where one way of moving KV is slow: reads or writes end later than they are done.

It stands for a GPU whose reads over PCIe are slow. Two environment variables say which way, and how slow.
"""

import os
import time

from support.legs import SLOW_OPERATION, SLOW_TRANSFERS
from xpyd_connector.io.nixl import NixlTransferAgent
from xpyd_connector.shell import worker
from xpyd_connector.shell.connector import XpydConnector


class SlowTransferAgent(NixlTransferAgent):
    """Holds back the ends of one operation's transfers."""

    def __init__(self, *args):
        super().__init__(*args)
        self._slow, self._held = set(), []  # transfers, and their ends with the time at which they are told

    def _post(self, operation, handle, spans):
        number = super()._post(operation, handle, spans)
        if operation == os.environ.get(SLOW_OPERATION):
            self._slow.add(number)
        return number

    def poll(self):
        now, told = time.monotonic(), []
        for ended in super().poll():
            if ended.xfer in self._slow:
                self._slow.discard(ended.xfer)
                self._held.append((now + float(os.environ[SLOW_TRANSFERS]), ended))
            else:
                told.append(ended)
        told += [ended for at, ended in self._held if at <= now]
        self._held = [(at, ended) for at, ended in self._held if at > now]
        return told


worker.NixlTransferAgent = SlowTransferAgent


class SlowConnector(XpydConnector):
    """The same connector; its name tells vLLM to import this module."""
