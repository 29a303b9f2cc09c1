"""The hooks in the life of a request's legs, for what the choice of engines learns from them."""

from pdrelay_proxy.core.model import Instance, InstanceId, RequestId, RoutingHints
from pdrelay_proxy.core.request_record import RequestRecord


class LegListener:
    """Is told of each leg, in this order; no call may wait or raise.

    A listener overrides what it needs.

    A class, because a compiled call of a Protocol is slow.
    """

    __slots__ = ()

    @property
    def times_streams(self) -> bool:
        """Whether ``stepped`` is called."""
        return False

    def slot_held(self, decode: Instance, request: RequestId, /) -> None:
        """A decode engine will get the request once a prefill engine has answered."""

    def leg_sent(
        self,
        engine: Instance,
        request: RequestId,
        hints: RoutingHints,
        /,
        *,
        computes: bool,
        is_timed: bool,
    ) -> None:
        """A leg goes to an engine.

        ``computes``: the engine computes what it lacks of the prompt; else another engine does.
        ``is_timed``: a call of ``prompt_computed`` or ``stream_begun`` will tell when that is done.
        """

    def prompt_computed(
        self, prefill: Instance, request: RequestId, hints: RoutingHints, counted: int | None, /
    ) -> None:
        """A prefill engine has answered; ``counted``: tokens of the prompt, if it says."""

    def stream_begun(self, decode: Instance, request: RequestId, hints: RoutingHints, /) -> None:
        """A decode engine has sent the first event of a stream."""

    def answered(self, decode: Instance, hints: RoutingHints, record: RequestRecord, /) -> None:
        """A decode engine has answered well, and the leg is over."""

    def left(self, engine: Instance, request: RequestId, /) -> None:
        """No leg of the request is at the engine any more."""

    def stepped(self, decode: InstanceId, gaps: list[float], /) -> None:
        """The streams of a decode engine lately got their tokens so many seconds apart."""
