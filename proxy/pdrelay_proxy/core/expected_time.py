"""The expected time to first token of one choice of engines, term by term."""


class ExpectedTime:
    """The expected wait of a request, when its engines were chosen. It is never changed.

    Times are seconds. ``burden_s`` is not part of the time to first token: it is the expected delay
    of other requests because of this one, and the slowness of its own later tokens.
    """

    __slots__ = (
        "burden_s",
        "decode_hit",
        "decode_s",
        "pause_s",
        "prefill_hit",
        "prefill_s",
        "queue_s",
        "tokens",
        "transfer_s",
    )

    def __init__(
        self,
        *,
        tokens: int,
        queue_s: float = 0.0,
        prefill_s: float = 0.0,
        transfer_s: float = 0.0,
        decode_s: float = 0.0,
        pause_s: float = 0.0,
        burden_s: float = 0.0,
        prefill_hit: int = 0,
        decode_hit: int = 0,
    ) -> None:
        self.tokens = tokens  # of the prompt
        self.queue_s = queue_s  # of the work before it at the engine that computes the prompt
        self.prefill_s = prefill_s  # of the prompt's new tokens
        # of the tokens that the decode engine lacks; 0: it computes the prompt itself
        self.transfer_s = transfer_s
        self.decode_s = decode_s  # of one step of the decode engine
        # of the decode engine's streams, while it computes the prompt; not part of the time
        self.pause_s = pause_s
        self.burden_s = burden_s
        self.prefill_hit = prefill_hit  # tokens that the prefill engine has
        self.decode_hit = decode_hit  # tokens that the decode engine has

    @property
    def ttft_s(self) -> float:
        """The expected time to first token."""
        return self.queue_s + self.prefill_s + self.transfer_s + self.decode_s

    @property
    def cost_s(self) -> float:
        """The value by which choices are compared."""
        return self.ttft_s + self.burden_s

    @property
    def milliseconds(self) -> dict[str, float]:
        """The terms by name, and their sum."""
        seconds = {
            "queue": self.queue_s,
            "prefill": self.prefill_s,
            "transfer": self.transfer_s,
            "decode": self.decode_s,
            "ttft": self.ttft_s,
        }
        return {name: round(value * 1e3, 1) for name, value in seconds.items()}

    def followed_by(self, decode: "ExpectedTime") -> "ExpectedTime":
        """Return the terms of a pair: these are the prefill engine's, ``decode`` the other's."""
        return ExpectedTime(
            tokens=self.tokens,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            transfer_s=decode.transfer_s,
            decode_s=decode.decode_s,
            burden_s=self.burden_s + decode.burden_s,
            prefill_hit=self.prefill_hit,
            decode_hit=decode.decode_hit,
        )

    def __str__(self) -> str:
        """Return the terms in milliseconds, and the hits of both engines in tokens."""
        times = (
            self.queue_s * 1e3,
            self.prefill_s * 1e3,
            self.transfer_s * 1e3,
            self.decode_s * 1e3,
        )
        written = "queue=%.1f prefill=%.1f transfer=%.1f decode=%.1f" % times  # noqa: UP031 (compiled, as written_ms)
        return f"{written} hits={self.prefill_hit},{self.decode_hit} of {self.tokens}"
