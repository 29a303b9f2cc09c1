"""Which memory KV may travel through: what cannot work is said at start, not by NIXL under load."""

import pytest

from pdrelay_connector.core.layout.buffer_device import check_buffer, is_staged, with_platform
from pdrelay_connector.errors import UnsupportedCache


@pytest.mark.parametrize("device", ["cuda", "xpu", "cpu"])
@pytest.mark.parametrize("buffer", ["cuda", "xpu", "tpu", "cpu"])
def test_every_pair_is_taken_or_refused_with_both_named(device, buffer):
    """The host's memory always works; a device's own only where NIXL is known to register it; another's never."""
    if buffer == "cpu" or (buffer == device == "cuda"):
        check_buffer(device, buffer)
        return
    with pytest.raises(UnsupportedCache, match=f"'{buffer}' does not go with a KV cache on '{device}'; it must be "):
        check_buffer(device, buffer)


def test_an_unknown_device_is_refused_unless_its_platform_says_what_it_can():
    """Platforms outside vLLM bring their own row; of it we take the host's memory, for the rest has no name here."""
    with pytest.raises(UnsupportedCache, match="known devices are cpu, cuda, xpu"):
        check_buffer("tpu", "cpu")
    buffers = with_platform({"npu": ("npu", "cpu"), "odd": ("odd",), "cuda": ("tpu",)})

    check_buffer("npu", "cpu", buffers)
    check_buffer("cuda", "cuda", buffers)
    with pytest.raises(UnsupportedCache, match="'npu' does not go with a KV cache on 'npu'; it must be 'cpu'"):
        check_buffer("npu", "npu", buffers)
    with pytest.raises(UnsupportedCache, match="known devices are cpu, cuda, npu, xpu"):
        check_buffer("odd", "odd", buffers)


@pytest.mark.parametrize(
    ("device", "buffer", "choice", "staged"),
    [
        ("cuda", "cuda", None, False),
        ("cuda", "cpu", None, True),
        ("cuda", "cuda", True, True),
        ("cuda", "cpu", False, False),
        ("xpu", "cpu", None, True),
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
    with pytest.raises(UnsupportedCache, match="'xpu' does not go with a KV cache on 'xpu'"):
        is_staged("xpu", "cpu", host_staging=False)
