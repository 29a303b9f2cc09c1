"""What an operator has decided about the way of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_proxy.core.model import Role
from xpyd_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the router waits, in seconds; None: for ever."""

    prefill_s: float = 300.0  # for a whole prefill leg
    first_token_s: float | None = 300.0  # for the first event of a stream, from the moment its decode leg is sent
    idle_s: float | None = 120.0  # for the next bytes of a stream
    whole_s: float | None = 3600.0  # for an answer that is not streamed, from the first leg on and with all retries
    stream_s: float | None = None  # for a stream, to its end
    handoff_s: float = 20.0  # from a prefill engine's answer until its blocks are not asked for any more

    def total_s(self, *, streams: bool) -> float | None:
        """Return how long a request may take."""
        return self.stream_s if streams else self.whole_s


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The choices."""

    retries: int = 2  # legs of one request that may fail before the client is told
    patience: Timeouts = Timeouts()
    min_split_prompt_bytes: int = 0  # a prompt with fewer is served by one engine
    decode_only_fallback: bool = True  # as long as there is no prefill engine, decode engines do both
    reuse_prompt_tokens: bool = False  # decode engines take a chat's tokens from the prefill engine
    resume_streams: bool = False  # another decode engine goes on with a stream that has broken off

    @property
    def needed(self) -> Sequence[Role]:
        """The roles without which no request is served."""
        return (Role.DECODE,) if self.decode_only_fallback else tuple(Role)


def rules_of(settings: Settings) -> RequestRules:
    """Return what the settings say about the way of a request."""
    patience = Timeouts(
        prefill_s=settings.prefill_timeout_s,
        first_token_s=settings.first_token_timeout_s,
        idle_s=settings.stream_idle_timeout_s,
        whole_s=settings.total_timeout_s,
        stream_s=settings.stream_timeout_s,
        handoff_s=settings.handoff_timeout_s,
    )
    return RequestRules(
        retries=settings.retries,
        patience=patience,
        min_split_prompt_bytes=settings.min_split_prompt_bytes,
        decode_only_fallback=settings.decode_only_fallback,
        reuse_prompt_tokens=settings.reuse_prompt_tokens,
        resume_streams=settings.resume_streams,
    )
