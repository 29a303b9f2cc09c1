"""The expected time to first token of one choice of engines, term by term."""


class ExpectedTime:
    """What a request waits for, as it was expected when its engines were chosen.

    It does not change.

    Times are seconds. ``burden_s`` is no part of the time to first token: it stands for what others
    wait for because of this request, and for how slowly its own answer will go on.
    """

    __slots__ = (
        *(
            "decode_hit",
            "decode_s",
            "pause_s",
            "prefill_hit",
            "prefill_s",
            "queue_s",
            "burden_s",
            "tokens",
            "transfer_s",
        ),
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
        self.queue_s = queue_s  # of what the engine that computes the prompt has to compute before
        self.prefill_s = prefill_s  # of the prompt's new tokens
        # of the tokens that the decode engine lacks; 0: it computes the prompt itself
        self.transfer_s = transfer_s
        self.decode_s = decode_s  # of one step of the decode engine
        # of the decode engine's streams, while it computes the prompt; no part of the time
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
        """What choices are compared by."""
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
        return {name: round(each * 1e3, 1) for name, each in seconds.items()}

    def followed_by(self, decode: "ExpectedTime") -> "ExpectedTime":
        """Return the terms of a pair: this is the prefill engine's part, the other one the decode
        engine's.
        """
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
        """Write the terms in milliseconds, and the hits in tokens: of the prefill, of the decode
        engine.
        """
        times = (
            self.queue_s * 1e3,
            self.prefill_s * 1e3,
            self.transfer_s * 1e3,
            self.decode_s * 1e3,
        )
        written = "queue=%.1f prefill=%.1f transfer=%.1f decode=%.1f" % times  # noqa: UP031 (compiled, as written_ms)
        return f"{written} hits={self.prefill_hit},{self.decode_hit} of {self.tokens}"
