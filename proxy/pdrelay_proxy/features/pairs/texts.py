"""Numbers of pairs of engines, for people."""


def rate(bytes_per_s: float | None) -> str:
    """Format a transfer rate with three digits."""
    if bytes_per_s is None:
        return "-"
    return (
        f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )


def duration(seconds: float | None) -> str:
    """Format a short time."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
