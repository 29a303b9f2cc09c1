"""The life of one request: two engines are picked, one prefills, the tokens of the other are passed on."""

from xpyd_proxy.relay.legs import Legs
from xpyd_proxy.relay.relay import Relay
from xpyd_proxy.relay.releasing import Releaser
from xpyd_proxy.relay.reply import Reply

__all__ = ["Legs", "Relay", "Releaser", "Reply"]
