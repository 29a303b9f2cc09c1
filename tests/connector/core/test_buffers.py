"""Which memory KV may travel through: what cannot work is said at start, not by NIXL under load."""

import pytest

from xpyd_connector.core.buffers import BUFFERS, check_buffer, is_staged
from xpyd_connector.errors import UnsupportedCache


@pytest.mark.parametrize("device", ["cuda", "xpu", "tpu", "cpu"])
@pytest.mark.parametrize("buffer", ["cuda", "xpu", "tpu", "cpu"])
def test_every_pair_is_taken_or_refused_with_both_named(device, buffer):
    """The host's memory always works; a device's own only where NIXL can register it; another's never."""
    if buffer == "cpu" or (buffer == device != "tpu"):
        check_buffer(device, buffer)
        return
    with pytest.raises(UnsupportedCache, match=f"'{buffer}' does not go with a KV cache on '{device}'; it must be "):
        check_buffer(device, buffer)


def test_an_unknown_device_is_refused_unless_its_platform_says_what_it_can():
    """Platforms outside vLLM bring their own row."""
    with pytest.raises(UnsupportedCache, match="known devices are cpu, cuda, tpu, xpu"):
        check_buffer("npu", "cpu")
    check_buffer("npu", "cpu", {**BUFFERS, "npu": ("cpu",)})


@pytest.mark.parametrize(
    ("device", "buffer", "choice", "staged"),
    [
        ("cuda", "cuda", None, False),
        ("cuda", "cpu", None, True),
        ("cuda", "cuda", True, True),
        ("cuda", "cpu", False, False),
        ("tpu", "cpu", None, True),
        ("cpu", "cpu", None, False),
        ("cpu", "cpu", True, True),
        ("cpu", "cpu", False, False),
    ],
)
def test_the_operator_decides_and_vllms_setting_where_he_does_not(device, buffer, choice, staged):
    """A CPU engine is its own host; it can be forced, for tests."""
    assert is_staged(device, buffer, host_staging=choice) is staged


def test_a_device_that_nixl_cannot_register_cannot_do_without():
    """However much one wants it."""
    with pytest.raises(UnsupportedCache, match="'tpu' does not go with a KV cache on 'tpu'"):
        is_staged("tpu", "cpu", host_staging=False)
