"""What Kubernetes mounts into a pod: token, namespace and authority; and the API's certificate by that authority."""

import shutil
import ssl
from pathlib import Path

from support.certificates import Authority
from support.kube_api import KubeApi


class ServiceAccount:
    """The files, in a folder of their own."""

    def __init__(self, folder: Path, token: str = "first") -> None:
        authority = Authority(folder, "cluster")
        server = authority.sign("server")
        self.folder = folder
        shutil.copy(authority.own.cert, folder / "ca.crt")
        (folder / "namespace").write_text("default")
        self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.tls.load_cert_chain(server.cert, server.key)
        self.renew(token)

    def renew(self, token: str) -> None:
        (self.folder / "token").write_text(f"{token}\n")

    def env(self, api: KubeApi) -> dict[str, str]:
        """Return what a process finds in its environment in this pod."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(api.port),
            "PDRELAY_SERVICE_ACCOUNT": str(self.folder),
        }
