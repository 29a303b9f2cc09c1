"""Links that go nowhere: a test sees what a core sends, and says what arrives."""

import itertools

from xpyd_connector.core.ids import ConnId


class RecordingLink:
    """Of a process to which others connect."""

    def __init__(self):
        self.sent, self.closed = [], []

    def send(self, conn, message):
        self.sent.append((conn, message))

    def close(self, conn):
        self.closed.append(conn)


class ConnectingLink(RecordingLink):
    """Of one that connects to others, too; connections are numbered from 1."""

    def __init__(self):
        super().__init__()
        self.conns = itertools.count(1)

    def connect(self, peer, engine):
        return ConnId(next(self.conns))
