"""A real browser without a window, driven over its own protocol through a pipe: nothing to install but the browser."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage")


class Page:
    """One tab. What the page complains about (errors, refused sources) is in ``complaints``."""

    def __init__(self, call):
        self._call = call
        self.complaints = []
        call.heard = self._hear
        for domain in ("Page", "Runtime", "Log"):
            call(f"{domain}.enable")

    def look(self, *, width=1280, height=900, dark=False, scale=1):
        """Be a screen of this size, in this taste. A narrow one is a phone's."""
        phone = {"mobile": width < 600, "deviceScaleFactor": scale}
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, **phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        """Load a page; its scripts may still be at work."""
        self._call("Page.navigate", url=url)

    def run(self, script):
        """Run JavaScript in the page and return what it comes to; promises are waited for."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script, *, seconds=30):
        """Wait until an expression is true in the page."""
        waiting = f"""new Promise((yes, no) => {{
            const end = Date.now() + {seconds * 1000};
            const look = () => {{
                let good = false;
                try {{ good = {script} }} catch (error) {{ /* not there yet */ }}
                if (good) yes(true); else if (Date.now() > end) yes(false); else setTimeout(look, 50);
            }};
            look();
        }})"""
        assert self.run(waiting), f"it did not come true: {script}; the page says {self.run('document.body.innerText')}"

    def picture(self, path):
        """Take a picture of the whole page, however long."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _hear(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])


class _Calls:
    """Asks the browser and waits for its answer; hears what it says in between."""

    def __init__(self, to, back):
        self._to, self._back = to, back  # descriptors
        self._read = b""
        self._numbers = itertools.count(1)
        self.session = None
        self.heard = lambda method, params: None

    def __call__(self, method, **params):
        number = next(self._numbers)
        said = {"id": number, "method": method, "params": params}
        if self.session:
            said["sessionId"] = self.session
        text = json.dumps(said).encode() + b"\0"
        while text:
            text = text[os.write(self._to, text) :]
        while (answer := self._next()).get("id") != number:
            self.heard(answer.get("method"), answer.get("params"))
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        while b"\0" not in self._read:
            some = os.read(self._back, 65536)
            assert some, "the browser has ended"
            self._read += some
        text, _, self._read = self._read.partition(b"\0")
        return json.loads(text)


@contextmanager
def browser():
    """Start one; yields its only tab. It has ended, with all that it wrote, when the block is left."""
    from_us, ours = os.pipe()
    theirs, to_them = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = f'exec "$@" 3<&{from_us} 4>&{to_them}'
        arguments = [CHROMIUM, *_FLAGS, f"--user-data-dir={home}", "about:blank"]
        child = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(from_us, to_them),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_them)
        try:
            call = _Calls(ours, theirs)
            tab = call("Target.createTarget", url="about:blank")["targetId"]
            call.session = call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            yield Page(call)
            call.session = None
            call("Browser.close")  # its helpers end with it; those of a killed one may still write
            child.wait(timeout=60)
        finally:
            os.close(ours)
            os.close(theirs)
            child.kill()
            child.wait()
