"""A decode engine that waits for pushes, on a link that goes nowhere."""

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PushParams
from pdrelay_connector.core.messages import PROTOCOL, Welcome
from pdrelay_connector.core.ports import PeerConnected
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.session.peers import PeerTable
from support.engines import FINGERPRINT, LEASE, lent, rank_info
from support.push_engines import PATIENCE, WAIT
from support.recording_link import ConnectingLink

P = EngineId("p0")
ADDRESS = Address("10.0.0.1", 5600)
A = RequestId("d-a")
B = RequestId("d-b")
T = RequestId("t")
RANKS = [rank_info("d/0", ranks=2), rank_info("d/1", rank=1, ranks=2)]


class ExpectingEngine:
    """The control thread of an engine with two ranks."""

    def __init__(self, link=None, counters=None, **options):
        self.link, self.counters, self.now = link or ConnectingLink(), counters or Counters(), 0.0
        self.peers = PeerTable(self.link, FINGERPRINT, self.counters, retry_after=1.0)
        self.lease_renewer = LeaseRenewer(self.link, self.peers, self.counters, heartbeat_interval=LEASE / 6)
        self.push_receiver = PushReceiver(
            self.link,
            self.peers,
            self.lease_renewer,
            self.counters,
            RANKS,
            timeout=WAIT,
            peer_timeout=PATIENCE,
            **options,
        )

    def expect(self, request=A, blocks=(4, 5), engine=P):
        self.lease_renewer.start_renewing(request, PushParams(engine, *ADDRESS, T, T), now=self.now)
        self.push_receiver.expect(PushOrder(request, T, engine, ADDRESS, "digest", lent(2, blocks)), now=self.now)

    @property
    def conn(self):
        return next(iter(self.peers._peers.values())).conn

    def connect(self, *, is_elsewhere=True):
        welcome = Welcome(PROTOCOL, P, FINGERPRINT, (rank_info("p"),))
        self.happen(PeerConnected(self.conn, welcome, is_elsewhere))

    def happen(self, event):
        """As Control routes what is not for the pushes themselves."""
        changed = self.lease_renewer.on(event, now=self.now)
        if changed is not None:
            self.push_receiver.peer_changed(changed, now=self.now)
