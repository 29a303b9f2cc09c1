"""The plugin's numbers where several API servers answer ``/metrics``: prometheus_client keeps them in files then."""

import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

pytestmark = pytest.mark.processes


SERVER = """
from pdrelay_connector.core.kv_events.event_hub import KVEventHub
from pdrelay_connector.shell.kv_event_metrics import KVEventMetrics

hub = KVEventHub()
metrics = KVEventMetrics(hub)
metrics.open()
hub.add_rank(0)
hub.add_rank(1)
hub.publish(0, b"no batch")
hub.join(lambda: None)
metrics.update()
metrics.update()
hub.remove_rank(1)
metrics.update()
"""


def test_several_api_servers_add_their_numbers_up(tmp_path):
    """Whichever of them is asked; what it kept to itself would differ from scrape to scrape."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SERVER], env=environment, check=True, timeout=60)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    lines = generate_latest(registry).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    assert found["vllm:pdrelay_kv_events_batches_total"] == "2.0"
    assert found["vllm:pdrelay_kv_events_refused_batches_total"] == "2.0"
    assert found["vllm:pdrelay_kv_events_forgotten_total"] == "4.0"
    assert found["vllm:pdrelay_kv_events_slow_readers_total"] == "0.0"
    assert found["vllm:pdrelay_kv_events_readers"] == "2.0"
    assert found['vllm:pdrelay_kv_events_blocks{engine="0"}'] == "0.0"
    assert found['vllm:pdrelay_kv_events_blocks{engine="1"}'] == "0.0"
