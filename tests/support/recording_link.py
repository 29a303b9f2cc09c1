"""Links that go nowhere: a test sees what a core sends, and says what arrives."""

import itertools

from pdrelay_connector.core.ids import ConnId, EngineEndpoint


class RecordingLink:
    """Of a process to which others connect."""

    def __init__(self):
        self.sent = []
        self.closed = []
        self.engines = {}

    def engine_of(self, conn):
        return self.engines.get(conn)

    def send(self, conn, message):
        self.sent.append((conn, message))

    def close(self, conn):
        self.closed.append(conn)

    def take_sent(self):
        """Return the messages since the last call."""
        sent = self.sent
        self.sent = []
        return [message for _, message in sent]


class ConnectingLink(RecordingLink):
    """Of one that connects to others, too; connections are numbered from 1."""

    def __init__(self):
        super().__init__()
        self.conns = itertools.count(1)
        self.met = []

    def connect(self, peer, engine):
        self.met.append(EngineEndpoint(engine, peer))
        return ConnId(next(self.conns))
