"""A registry of OCI artifacts on loopback, as small as helm needs it: blobs and manifests, pushed and pulled."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from urllib.parse import parse_qs, urlsplit

BLOB = re.compile(r"/v2/([\w./-]+)/blobs/(sha256:[0-9a-f]{64})")
UPLOAD = re.compile(r"/v2/([\w./-]+)/blobs/uploads/(\w*)")
MANIFEST = re.compile(r"/v2/([\w./-]+)/manifests/([\w.:+-]+)")
TAGS = re.compile(r"/v2/([\w./-]+)/tags/list")


class Registry:
    """What was pushed: blobs by digest, manifests by repository and reference."""

    def __init__(self):
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.asked: list[str] = []  # method and path of every request


@contextlib.contextmanager
def oci_registry():
    """Serve one; yields its host:port and what it holds."""
    registry = Registry()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"registry": registry}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", **headers):
        self.registry.asked.append(f"{self.command} {self.path}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = urlsplit(self.path).path
        if path == "/v2/":
            self._answer(200, b"{}")
        elif (found := BLOB.fullmatch(path)) and found[2] in self.registry.blobs:
            kind = "application/octet-stream"
            self._answer(200, self.registry.blobs[found[2]], Docker_Content_Digest=found[2], Content_Type=kind)
        elif (found := MANIFEST.fullmatch(path)) and found.groups() in self.registry.manifests:
            kind, body = self.registry.manifests[found.groups()]
            self._answer(200, body, Docker_Content_Digest=_digest(body), Content_Type=kind)
        elif found := TAGS.fullmatch(path):
            tags = [tag for name, tag in self.registry.manifests if name == found[1] and ":" not in tag]
            self._answer(200, json.dumps({"name": found[1], "tags": tags}).encode())
        else:
            self._answer(404, b'{"errors": [{"code": "NAME_UNKNOWN"}]}')

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        found = UPLOAD.fullmatch(urlsplit(self.path).path)
        self._body()
        self._answer(202 if found else 404, Location=f"{self.path}one", Docker_Upload_UUID="one")

    def do_PUT(self):
        where = urlsplit(self.path)
        body = self._body()
        if UPLOAD.fullmatch(where.path):
            said = parse_qs(where.query)["digest"][0]
            if said != _digest(body):
                self._answer(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
                return
            self.registry.blobs[said] = body
            self._answer(201, Location=f"/v2/blobs/{said}", Docker_Content_Digest=said)
        elif found := MANIFEST.fullmatch(where.path):
            kept = self.headers["Content-Type"], body
            self.registry.manifests[found.groups()] = self.registry.manifests[found[1], _digest(body)] = kept
            self._answer(201, Location=where.path, Docker_Content_Digest=_digest(body))
        else:
            self._answer(404)

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


def _digest(body):
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
