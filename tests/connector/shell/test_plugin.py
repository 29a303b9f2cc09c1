"""vLLM knows the connector by its name, however it has been loaded."""

import os
import subprocess
import sys

import pytest

KNOWN = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory._registry["XpydConnector"]().__module__)
"""


@pytest.mark.parametrize(
    "loads",
    [
        "import xpyd_connector; xpyd_connector.XpydConnector",  # kv_connector_module_path, without the entry point
        "from xpyd_connector.shell.plugin import register; register(); register()",  # the entry point
        "from xpyd_connector.shell.plugin import register; register(); import xpyd_connector.shell.connector",
    ],
)
def test_whichever_way_it_is_loaded_its_name_is_known(loads):
    """MultiConnector looks its children up by name only, and registering a name twice is an error in vLLM."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", loads + KNOWN], env=environment, capture_output=True, text=True, timeout=50, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "xpyd_connector.shell.connector"
