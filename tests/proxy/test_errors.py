"""What led to an error."""

from pdrelay_proxy.errors import causes, forget_frames


def _raised(error, cause):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_errors_may_lead_back_to_themselves():
    """Python lets them, and a loop without an end would cost all clients their answers."""
    first = ValueError("first")
    second = OSError("second")
    try:
        raise first
    except ValueError:
        _raised(second, None)
    error = _raised(first, second)

    assert second.__context__ is error
    assert list(causes(error)) == [first, second]
    assert forget_frames(error).__traceback__ is second.__traceback__ is None
