"""An engine as OpenShift runs it: a user whom no file knows, in root's group, with the environment of the chart."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import Connector, Role, argv
from support.cluster import MODEL_NAME, ROOT, engine_spec
from support.helm_chart import TOOLS, Chart
from support.helm_objects import env, pool, templates

# An engine more, that no other test can use: a minute. It takes root, to become that user.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(600)]

USER = 12345
ON_A_CPU = {  # of no matter to homes: what keeps an engine of these tests small, and on this machine alone
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", "UCX_NET_DEVICES": "lo", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def python_of_all_users():
    """Return an interpreter of this version that every user may run; its packages are those of this one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in (os.path.realpath(sys.executable), shutil.which(version, path="/usr/bin:/usr/local/bin")):
        if found and all(parent.stat().st_mode & 0o55 == 0o55 for parent in (Path(found), *Path(found).parents)):
            return found
    return pytest.skip(f"there is no {version} that other users may run")


@pytest.fixture
def volumes(model):
    """What is mounted: folders that the user may write to, the model, and the secret. Pytest's own folders are ours."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("cache", "tmp"):
            (folder / name).mkdir(mode=0o700)
            os.chown(folder / name, USER, 0)
        (folder / "secret").write_text("what all engines of this test share")
        shutil.copytree(model, folder / "model")
        for path in (folder, folder / "model", *(folder / "model").iterdir()):
            path.chmod(0o755)
        yield folder


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="it takes root and setpriv")
@pytest.mark.skipif(not (TOOLS / "helm4").exists(), reason="there is no helm: make test-helm fetches it")
def test_an_engine_starts_and_answers_as_a_user_without_a_home(fleet, volumes):
    """The image's home is root's: what is not sent elsewhere by the chart goes to /.cache or /.triton, and fails."""
    (template,) = templates(pool(Chart().objects(ci="openshift"), "decode"))
    places = {
        "/cache": str(volumes / "cache"), "/tmp": str(volumes / "tmp"), "$(POD_IP)": "127.0.0.1",
        "/etc/pdrelay/connector": str(volumes),
    }  # fmt: skip
    given = {"POD_IP": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    for name, one in env(template).items():
        text = one.get("value", "")
        found = next((old for old in places if text.startswith(old)), None)
        given |= {name: text if found is None else places[found] + text.removeprefix(found)} if text else {}
    spec = engine_spec(
        "any-user", volumes / "model", role=Role.DECODE, connector=Connector.PDRELAY, served_name=MODEL_NAME
    )
    given |= ON_A_CPU | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port), "PATH": "/usr/bin:/bin"}
    packages = [ROOT / "proxy", ROOT / "connector", *filter(lambda path: path.endswith("-packages"), sys.path)]
    given["PYTHONPATH"] = os.pathsep.join(map(str, packages))
    person = ["setpriv", "--reuid", str(USER), "--regid", "0", "--clear-groups", python_of_all_users()]
    child = fleet.start(Command(spec.name, [*person, *argv(spec)[1:]], given, f"{spec.base_url}/health"))
    fleet.wait_ready([child], timeout_s=400)

    body = {"model": MODEL_NAME, "prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{spec.base_url}/v1/completions", json=body, timeout=60)

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert list((volumes / "cache").iterdir())  # what is left went to /tmp, a volume of the pod
    fleet.stop(child)
