"""What can be wrong with KV events.

Compiled classes, as those of the core, derive from compiled ones alone.
"""

from pdrelay_proxy.errors import EngineError


class BadKvEvents(EngineError):
    """What an engine says of its cache cannot be read, or has gaps."""
