"""Texts that several routers share, over each kind of store."""

from contextlib import asynccontextmanager

from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.stores.file_text import FileText
from pdrelay_proxy.features.stores.lease_text import LeaseText
from pdrelay_proxy.features.stores.redis import RedisText
from support.kube_api import KubeApi
from support.redis_server import RedisServer

LASTS_S = 15  # seconds that a lease lasts


@asynccontextmanager
async def file_texts(folder):
    path = folder / "set.json.roles"
    yield lambda: FileText(str(path)), lambda: path.mkdir()


@asynccontextmanager
async def lease_texts(_):
    api = KubeApi()
    clients = []
    await api.start()
    api.put("leases", "r-roles", {"metadata": {}})

    def text():
        clients.append(Kubernetes(Cluster(api.url, "default"), timeout_s=20))
        return LeaseText(clients[-1], "r-roles", "pdrelay/roles", lasts_s=LASTS_S)

    try:
        yield text, lambda: api.delete("leases", "r-roles")
    finally:
        for client in clients:
            async with client:
                pass
        await api.stop()


@asynccontextmanager
async def redis_texts(folder):
    server = RedisServer(folder)
    texts = []
    server.start()

    def text():
        texts.append(RedisText(server.url + "&prefix=a", "roles"))
        return texts[-1]

    try:
        yield text, server.stop
    finally:
        for one in texts:
            await one.aclose()
        server.stop()


# Each yields what makes another process's view of the same text, and what breaks it.
SHARED_TEXTS = {"file": file_texts, "kubernetes": lease_texts, "redis": redis_texts}
