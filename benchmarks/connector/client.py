"""Both legs of a request over one kept-alive HTTP client, and when what happened."""

import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx

OPEN = {"do_remote_decode": True, "do_remote_prefill": False}
WORDS = (260, 512)  # the tokens of the models that are pieces of words, not single bytes
COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")


class Legs(NamedTuple):
    """One request. Times are on the monotonic clock."""

    name: str  # in both engines' ids of it
    start: float  # the first leg leaves
    prefilled: float  # P's reply is here
    decode: float  # D's leg leaves
    first_token: float


class Client:
    """Sends legs. vLLM closes connections that are idle for 5 s: we do so before."""

    def __init__(self):
        self._http = httpx.Client(
            timeout=300, trust_env=False, limits=httpx.Limits(keepalive_expiry=4)
        )
        self._pool = ThreadPoolExecutor(1)
        self._known = {}  # P's base URL -> what a decode leg must know of P

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def pull(self, pair, prompt):
        """Send D's leg when P has answered."""
        name = _name()
        start = time.monotonic()
        params = self.prefill(pair.p, prompt, name)
        prefilled = time.monotonic()
        return Legs(name, start, prefilled, prefilled, self._decode(pair.d, prompt, name, params))

    def push(self, pair, prompt, *, meanwhile=lambda: None):
        """Send both legs at once; or P's only after ``meanwhile()``, which runs when D's is on its
        way.
        """
        name = _name()
        known = self._known[pair.p.base_url]
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": name,
            **known,
        }
        params["remote_request_id"] = f"cmpl-{name}-0"
        start = time.monotonic()
        first_token = self._pool.submit(self._decode, pair.d, prompt, name, params)
        meanwhile()
        self.prefill(pair.p, prompt, name)
        return Legs(name, start, time.monotonic(), start, first_token.result())

    def meet(self, pair, prompt):
        """Send D's leg when P has answered, and learn from the answer how to push."""
        name = _name()
        params = self.prefill(pair.p, prompt, name)
        self._known[pair.p.base_url] = {key: params[key] for key in COORDINATES}
        self._decode(pair.d, prompt, name, params)

    def prefill(self, p, prompt, name):
        """Return P's params for the decode leg."""
        params = OPEN | {"transfer_id": name}
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 1,
            "min_tokens": 1,
            "kv_transfer_params": params,
        }
        reply = self._http.post(
            f"{p.base_url}/v1/completions", json=body, headers={"X-Request-Id": name}
        )
        return reply.raise_for_status().json()["kv_transfer_params"]

    def first_leg(self, engine, prompt, *, is_leg):
        """Ask an engine for one token, as a leg of a request or as a whole one."""
        if is_leg:
            return self.prefill(engine, prompt, _name())
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "min_tokens": 1}
        return (
            self._http.post(f"{engine.base_url}/v1/completions", json=body)
            .raise_for_status()
            .json()
        )

    def decode(self, d, prompt, *, params=None):
        """Ask D alone; return when its first token came."""
        return self._decode(d, prompt, _name(), params)

    def _decode(self, d, prompt, name, params):
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 2,
            "ignore_eos": True,
            "stream": True,
        }
        body |= {"kv_transfer_params": params, "temperature": 0}
        url = f"{d.base_url}/v1/completions"
        headers = {"X-Request-Id": name}
        with self._http.stream("POST", url, json=body, headers=headers) as reply:
            reply.raise_for_status()
            first = b""
            now = 0.0
            for piece in reply.iter_bytes():
                if b"\n" not in first:
                    first += piece
                    now = time.monotonic()
        if b'"text":' not in first.partition(b"\n")[0]:
            raise RuntimeError(f"D answers {name} with {first.decode()}")
        return now


def prompts():
    """Return a function that gives a prompt of so many tokens, never the same beginning twice."""
    draw = random.Random(4)
    return lambda length: [draw.randrange(*WORDS) for _ in range(length)]


def _name():
    return f"bench-{uuid.uuid4().hex}"
