"""The client of the Kubernetes API: who we are, what is asked, and what is said when it fails."""

import asyncio
import contextlib
import json
import shutil

import pytest

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.kubernetes.client import Cluster, Expired, KubeError, Kubernetes
from support.certificates import Authority
from support.kube_api import Call, KubeApi, Refusal, pod
from support.service_account import ServiceAccount

pytestmark = pytest.mark.processes


PODS = "/api/v1/namespaces/default/pods"
MAP = "/api/v1/namespaces/default/configmaps/set"


@pytest.fixture
def account(tmp_path):
    return ServiceAccount(tmp_path)


def inside(account, api):
    return Cluster.around(None, account.env(api))


async def test_a_pod_finds_its_cluster_and_the_token_may_change(account):
    """Kubernetes renews the token in the file every hour; the old one soon counts no more."""
    async with KubeApi(token="first", tls=account.tls) as api, Kubernetes(inside(account, api)) as client:
        await client.get(PODS, {})
        api.token = "second"
        with pytest.raises(KubeError, match="401"):
            await client.get(PODS, {})
        account.renew("second")
        await client.get(PODS, {})

    assert client.namespace == "default"


async def test_an_api_with_a_certificate_of_somebody_else_is_not_spoken_to(account, tmp_path_factory):
    """The token would be his."""
    other = Authority(tmp_path_factory.mktemp("other"), "other")
    shutil.copy(other.own.cert, account.folder / "ca.crt")
    async with KubeApi(tls=account.tls) as api, Kubernetes(inside(account, api)) as client:
        with pytest.raises(KubeError, match="ConnectError"):
            await client.get(PODS, {})
    assert api.calls == []


@pytest.mark.parametrize("missing", ["token", "namespace", "ca.crt"])
async def test_what_is_missing_of_a_service_account_is_said_at_the_start(account, missing):
    """Naming the file."""
    (account.folder / missing).unlink()
    async with KubeApi(tls=account.tls) as api:
        with pytest.raises(ConfigError, match=missing):
            Kubernetes(inside(account, api))


def test_outside_of_a_cluster_it_is_said_as_well():
    """Before anything is served."""
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        Cluster.around(None, {})


async def test_a_patch_changes_one_key_and_returns_the_whole():
    """Other keys are other routers'."""
    async with KubeApi() as api, Kubernetes(Cluster(api.url, "default")) as client:
        api.put("configmaps", "set", {"metadata": {}, "data": {"a": "1", "b": "2"}})
        answer = json.loads(await client.merge_patch(MAP, b'{"data": {"b": null, "c": "3"}}'))
        assert answer["data"] == {"a": "1", "c": "3"}
        assert api.calls == [Call("patch", "configmaps", "set", "default")]


@pytest.mark.parametrize("code", [401, 403, 404, 409, 410, 422, 429, 500, 503])
async def test_a_refusal_is_one_sentence_with_its_status(code):
    """And 410 is told apart: it says to list anew."""
    async with KubeApi() as api, Kubernetes(Cluster(api.url, "default")) as client:
        api.faults.refusals.append(Refusal(code, "because", Retry_After="7"))
        with pytest.raises(KubeError, match=f"status {code}.*because") as info:
            await client.get(PODS, {})
    assert (info.value.status, info.value.retry_after_s) == (code, 7.0)
    assert isinstance(info.value, Expired) == (code == 410)


@pytest.mark.parametrize("token", ["hunter\n2", "hunter 2", "hunter\x002", ""])
async def test_a_file_that_has_no_token_is_named_and_not_quoted(account, token):
    """The header would be none, and the error of the library would put it into the log."""
    account.renew(token)
    async with KubeApi(token="secret", tls=account.tls) as api, Kubernetes(inside(account, api)) as client:
        with pytest.raises(KubeError, match="token is no token: it must be one word") as info:
            await client.get(PODS, {})
    assert "hunter" not in str(info.value)
    assert api.calls == []


async def test_a_watch_that_is_refused_without_end_is_read_as_far_as_it_is_quoted():
    """A gateway before the API answers, and never stops."""
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    most = 1024
    written = []

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while len(written) < most:
                written.append(writer.write(piece))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with (
        server,
        Kubernetes(Cluster(f"http://{host}:{port}", "default")) as client,
        contextlib.aclosing(client.watch(PODS, {"watch": "true"}, silence_s=20)) as lines,
    ):
        with pytest.raises(KubeError, match="status 503: xxx") as info:
            await anext(lines)
    assert len(str(info.value)) < 500
    assert len(written) < most


async def test_an_answer_that_takes_too_long_and_a_watch_in_silence_end():
    """Each by its own limit."""
    async with KubeApi() as api:
        api.faults.slow_list_s = 5
        async with Kubernetes(Cluster(api.url, "default"), timeout_s=0.2) as client:
            with pytest.raises(KubeError, match=r"within 0.2 s|in time"):
                await client.get(PODS, {})
    async with KubeApi() as api, Kubernetes(Cluster(api.url, "default"), timeout_s=20) as client:
        api.faults.hangs = True
        async with contextlib.aclosing(client.watch(PODS, {"watch": "true"}, silence_s=0.1)) as lines:
            with pytest.raises(KubeError, match="in time"):
                await anext(lines)


async def test_an_api_that_is_not_there_is_said():
    """Nothing of httpx comes out."""
    async with Kubernetes(Cluster("http://127.0.0.1:9", "default")) as client:
        with pytest.raises(KubeError, match="ConnectError"):
            await client.get(PODS, {})


async def test_kubectl_reads_from_the_fake(account, tmp_path):
    """What the fake says is Kubernetes to the real client, too."""
    async with KubeApi(token="secret", tls=account.tls) as api:
        for number in range(3):
            api.put("pods", f"p{number}", pod(f"10.0.0.{number}", role="decode" if number else "prefill"))

        said, err, code = await kubectl(
            tmp_path,
            *("-s", api.url, "--token=secret", f"--certificate-authority={account.folder / 'ca.crt'}"),
            *("get", "pods", "-l", "pdrelay/role=decode", "-o", "name"),
        )

        assert (code, said.split()) == (0, ["pod/p1", "pod/p2"]), err


async def kubectl(folder, *args):
    try:
        process = await asyncio.create_subprocess_exec(
            "kubectl",
            *args,
            env={"HOME": str(folder), "PATH": "/usr/bin:/usr/local/bin:/bin"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        pytest.skip("there is no kubectl here")
    said, err = await process.communicate()
    return said.decode(), err.decode(), process.returncode
