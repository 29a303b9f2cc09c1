"""The beginning of a stream that its client gets before a decode engine has answered: the place of
a feature that finds one in what prefill engines answer.

Classes, because a compiled call of a Protocol is slow. No call may wait or raise.
"""

from abc import ABC, abstractmethod

import msgspec

from pdrelay_proxy.core.model import GenerationRequest, InstanceId, PrefillResult
from pdrelay_proxy.core.protocol.continuation import Continuation
from pdrelay_proxy.core.raw_json import Fields
from pdrelay_proxy.settings import Settings


class Opening(ABC):
    """The beginning of one stream, and what a decode engine is asked behind it."""

    __slots__ = ("is_all", "tokens")

    def __init__(self, tokens: int, is_all: bool) -> None:  # noqa: FBT001 (by name it costs more)
        """``tokens``: how many it has; ``is_all``: nothing follows."""
        self.tokens = tokens
        self.is_all = is_all

    @abstractmethod
    def events(self) -> bytes:
        """Return what the client gets."""

    @abstractmethod
    def decode_fields(self, fields: Fields, params: msgspec.Raw) -> Fields:
        """Return what a decode engine is asked; ``fields``: those for a whole answer."""

    @abstractmethod
    def continuation(self, *, can_resume: bool) -> Continuation:
        """Return what joins the decode engine's stream to it; ``can_resume``: another engine may go
        on with that one.
        """


class StreamOpenings:
    """Without a feature no stream has one."""

    __slots__ = ()

    def are_wanted(self, _settings: Settings, /) -> bool:
        """Tell whether streams that other engines can continue may have one."""
        return False

    def prefill_fields(self, _call: GenerationRequest, _prefill: InstanceId, /) -> Fields | None:
        """Return what a prefill engine is asked beside its usual leg, so that its answer tells the
        tokens of one; None: it will have none.
        """
        return None

    def read_opening(
        self,
        _call: GenerationRequest,
        _prefill: InstanceId,
        _handover: PrefillResult,
        /,
        *,
        is_asked: bool,  # noqa: ARG002 (a feature's)
        is_auto: bool,  # noqa: ARG002 (a feature's)
    ) -> Opening | None:
        """Return what a prefill engine's answer has; ``is_asked``: the engine was asked for it.

        ``is_auto``: the engine can be read from, and can push, so one answer does not show what the
        next is good for.
        """
        return None

    def forget(self, prefill: InstanceId, /) -> None:
        """Forget an engine that has failed: another one may answer at its address."""
