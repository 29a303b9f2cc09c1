"""What moves bytes and copies blocks, with nothing behind it: a test sees what is asked of it, and ends it."""

from pdrelay_connector.core.ids import CopyId, XferId
from pdrelay_connector.core.ports import CopyResult, XferEnded, XferOutcome
from pdrelay_connector.errors import TransferError


class RecordingAgent:
    """Of NIXL. A rank's handle is its name; ``fails`` says of a handle why it cannot be used, or nothing."""

    def __init__(self, fails=lambda handle: None):
        self.fails = fails
        self.attached = []
        self.detached = []
        self.posted = []
        self.cancelled = []
        self._ended = []

    def _check(self, handle):
        if reason := self.fails(handle):
            raise TransferError(reason)

    def attach(self, peer):
        handle = peer.agent.decode()
        self._check(handle)
        if handle in self.attached:  # as NIXL's does (io/nixl.py)
            raise TransferError(f"NIXL agent {handle} is attached already, to another engine or with other memory")
        self.attached.append(handle)
        return handle

    def detach(self, handle):
        self.attached.remove(handle)
        self.detached.append(handle)

    def read(self, handle, spans):
        """Note the handle and the runs; transfers are numbered from 0."""
        self._check(handle)
        self.posted.append((handle, spans))
        return XferId(len(self.posted) - 1)

    write = read

    def cancel(self, xfer):
        self.cancelled.append(xfer)

    def end(self, *xfers, outcome=XferOutcome.DONE, reason=""):
        self._ended += [XferEnded(XferId(xfer), outcome, 64, 1, 0.1, reason, 0.01) for xfer in xfers]

    def poll(self):
        ended = self._ended
        self._ended = []
        return ended


class RecordingCopier:
    """Of a device. Copies are numbered from 0."""

    def __init__(self):
        self.copies, self._ended = [], []

    def out(self, blocks, slots):
        self.copies.append(([list(group) for group in blocks], [list(group) for group in slots]))
        return CopyId(len(self.copies) - 1)

    into = out  # from slots into blocks

    def end(self, *copies, reason=""):
        self._ended += [CopyResult(CopyId(copy), reason, 0 if reason else 64) for copy in copies]

    def poll(self):
        ended = self._ended
        self._ended = []
        return ended
