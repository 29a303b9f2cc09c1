"""What starts an engine that has plugins of the API server, as the chart runs it, with a command in place of vLLM."""

import os
import subprocess
import sys

import pytest

from support.helm_chart import CHART, Chart
from support.helm_objects import container, pool, templates

pytestmark = pytest.mark.processes


def start(tmp_path, installed, environment):
    """Run it where these plugins are installed; return what is in VLLM_PLUGINS and the arguments, and what is said."""
    for number, (group, name) in enumerate(installed):
        info = tmp_path / f"site/one{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: one{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.{group}_plugins]\n{name} = a:b\n")
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\necho "${VLLM_PLUGINS-unset}: $*"\n')
    vllm.chmod(0o755)
    argv = [sys.executable, "-S", CHART / "files/start.py", "pdrelay,pdrelay_kv_events", "serve", "a model"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "site"), **environment}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=60)


INSTALLED = [("general", "pdrelay"), ("general", "models"), ("platform", "npu"), ("endpoint", "another")]


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ({}, "models,npu,pdrelay,pdrelay_kv_events"),  # no other endpoint: those are opened by name alone
        ({"VLLM_PLUGINS": "npu"}, "npu,pdrelay,pdrelay_kv_events"),
        ({"VLLM_PLUGINS": ""}, "pdrelay,pdrelay_kv_events"),
    ],
)
def test_plugins_are_named_beside_those_that_vllm_would_load(tmp_path, before, named):
    """An image's platform and models would be gone, if only ours were named."""
    assert start(tmp_path, INSTALLED, before).stdout == f"{named}: serve a model\n"


def test_a_python_that_is_not_vllms_changes_nothing(tmp_path):
    """It does not know what vLLM would load."""
    done = start(tmp_path, [], {})

    assert done.stdout == "unset: serve a model\n"
    assert "sees no plugins of vLLM" in done.stderr


@pytest.mark.parametrize("tells", [False, "auto"])
def test_one_value_has_engines_keep_timelines(tells):
    """Engines start by vLLM itself where there is no such plugin."""
    values = {"kvEvents": {"enabled": tells}, "engine": {"apiKey": {"secretName": "engines"}}}
    named = "pdrelay,pdrelay_kv_events,pdrelay_timelines" if tells else "pdrelay,pdrelay_timelines"

    for role in ("prefill", "decode"):
        one = container(templates(pool(Chart().objects(values | {"timelines": {"enabled": True}}), role))[0])
        assert one["command"] == ["python3", "/opt/pdrelay/start.py", named]
        assert container(templates(pool(Chart().objects({}), role))[0])["command"] == ["vllm"]
