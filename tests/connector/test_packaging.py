"""What may be imported where, and that it costs nothing."""

import subprocess
import sys

import pytest

import pdrelay_connector

pytestmark = pytest.mark.processes


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50).stdout


def test_importing_the_package_loads_neither_vllm_nor_torch_nor_nixl():
    """So that everything below the shell is testable anywhere, and a router's image needs none of them."""
    heavy = "sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'torch', 'nixl', 'zmq'})"
    modules = "io.runner", "io.link", "core.control", "settings"
    everything = ", ".join(f"pdrelay_connector.{module}" for module in modules)

    assert run(f"import sys, {everything}; print({heavy})") == "[]\n"


def test_other_names_are_not_there():
    """The lazy lookup does not swallow typing errors."""
    assert pdrelay_connector.__all__ == ["PDRelayConnector"]
    with pytest.raises(AttributeError, match="has no attribute 'PDRelayConector'"):
        _ = pdrelay_connector.PDRelayConector
