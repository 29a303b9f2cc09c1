"""The router's own HTTP/1.1 client for the legs: a prefill leg and a stream cost it 0.1 ms of a
processor.
"""

from pdrelay_proxy.io.wire.engines import WireEngines

__all__ = ["WireEngines"]
