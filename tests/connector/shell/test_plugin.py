"""vLLM knows the connector by its name, however it has been loaded."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


WAYS = (
    "import pdrelay_connector; pdrelay_connector.PDRelayConnector",  # kv_connector_module_path, without the entry point
    "from pdrelay_connector.shell.plugin import register; register(); register()",  # the entry point
    "from pdrelay_connector.shell.plugin import register; register(); import pdrelay_connector.shell.connector",
)
# Importing vLLM takes ten seconds of CPU: each way is gone in a fork of one process that has done so.
EACH_WAY = """
import os, sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "PDRelayConnector" not in KVConnectorFactory._registry
for number, loads in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        exec(loads)
        print(number, KVConnectorFactory._registry["PDRelayConnector"]().__module__, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def known():
    """How vLLM knows the connector that was loaded in each way."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", EACH_WAY, *WAYS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,  # for what hangs: importing vLLM takes 12 CPU seconds, and takes its turn with other tests
        check=False,
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow  # a process imports vLLM in each way
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_whichever_way_it_is_loaded_its_name_is_known(known, way):
    """MultiConnector looks its children up by name only, and registering a name twice is an error in vLLM."""
    lines, errors = known

    assert f"{way} pdrelay_connector.shell.connector" in lines, errors
