"""What the documents tell people to type works: commands are parsed or run, requests sent, snippets and files read."""

import argparse
import ast
import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from pdrelay_connector.settings import read_settings, remarks
from pdrelay_proxy.app import build
from pdrelay_proxy.cli import build_parser, main
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.options import serve_settings
from pdrelay_proxy.settings import Settings
from support.certificates import Authority
from support.documents import PAGES, ROOT, block_lines, blocks, commands, spans
from support.sim import Sim, cluster, serving

pytestmark = pytest.mark.processes


KEY = "of-a-client-0123456789"
MODEL = "qwen3-8b"  # of docs/kubernetes.md
TLS = {"--ca", "--pin"}
PLACES = {  # what stands for a word of one's own, and such a word; others are in the fixture `fleet`
    "URL": "http://p:8100", "N": "2", "S": "5", "ID": "decode-0", "NAME": "name", "TRACE": "trace.jsonl",
    "SECONDS:RATE:PROMPT:OUTPUT": "60:1:100:10", "file:": "file:f", "$@": "list",
}  # fmt: skip
LACKS = "the following arguments are required|expected one argument"


def _written():
    """Yield each command of ours, once: its words, and whether a block shows it, to be pasted as it is."""
    seen = set()
    for page in PAGES:
        text = page.read_text()
        typed = [line for line in block_lines(text) if re.match(r"\$? ?pdrelay |.* (exec|run) ", line)]
        typed = [(line, True) for line in typed] + [(line, False) for line in spans(text)]
        for line, pasted in typed:
            for kind, name, arguments in commands(re.sub(r"^every ", "pdrelay instances ", line)):
                found = (name, *_without_dots(arguments))
                if kind == "pdrelay" and "|" not in "".join(arguments) and found not in seen:
                    seen.add(found)
                    yield found, pasted


def _without_dots(arguments):
    """Leave out `...`, and the flag whose value it stands for."""
    for word, following in itertools.pairwise([*arguments, None]):
        if word and not (word.startswith("--") and following == ""):
            yield word


WRITTEN = [*_written()]


def _id(written):
    return " ".join(written) if isinstance(written, tuple) else ""


def _parsed(found):
    """Return what the parser makes of a command, or its complaint."""
    words = [PLACES.get(word, word) for word in found]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            return build_parser(words).parse_args(words)
    except SystemExit:
        return complaint.getvalue()


def _complete(*names):
    """The commands with these names that are written with all they need."""
    return [found for found, _ in WRITTEN if found[0] in names and isinstance(_parsed(found), argparse.Namespace)]


@pytest.mark.parametrize(("found", "pasted"), WRITTEN, ids=_id)
def test_a_command_is_understood(found, pasted):
    """By the real parser, all values included. Only prose may name a command without what it needs."""
    parsed = _parsed(found)

    if not isinstance(parsed, argparse.Namespace):
        assert re.search(LACKS, parsed)
        assert not pasted


@pytest.mark.parametrize("found", _complete("serve"), ids=_id)
def test_a_router_is_built_of_what_is_written(found, tmp_path, monkeypatch):
    """With the files that the pages show: clients' keys, an authority of engines, and a file of settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDRELAY_PREFILL_API_KEY", "secret-of-the-engines")
    (tmp_path / "keys.txt").write_text(f"somebody:{KEY}\n")
    (tmp_path / "pdrelay.toml").write_text('prefill = ["p0:8100"]\ndecode = ["d0:8100"]\n')
    if "ca.crt" in found:
        Path(Authority(tmp_path, "engines").own.cert).rename("ca.crt")

    assert build(serve_settings(_parsed(found))).app.routes


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """A router and four engines that can turn, and the words that stand for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    (tmp_path / "admin-key").write_text("sesame\n")
    (tmp_path / "client-keys").write_text(f"somebody:{KEY}\n")
    settings = Settings(
        admin_key="sesame", health_check_interval_s=0.0, resume_streams=True,
        api_keys_file=str(tmp_path / "client-keys"),
    )  # fmt: skip
    with (
        cluster(2, 2, settings, kv_both=True, model=MODEL) as running,
        serving(Sim("decode", model=MODEL, cache_blocks=8)) as spare,
    ):
        with httpx.Client(
            base_url=f"http://{running.router}", headers={"Authorization": f"Bearer {KEY}"}, timeout=20
        ) as client:
            served = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "model": MODEL})
            rows = client.get("/instances", headers={"X-Api-Key": "sesame"}).json()["instances"]
        yield {
            "router": running.router, "HOST:PORT": spare, "127.0.0.1:8299": spare,
            "NAME": served.headers["x-request-id"],
            "decode:8200": next(row["address"] for row in rows if row["id"] == "decode-0"),
            "/run/secrets/admin-key": str(tmp_path / "admin-key"),
        }  # fmt: skip


@pytest.mark.parametrize(
    "found", [one for one in _complete("instances", "pairs", "why") if TLS.isdisjoint(one)], ids=_id
)
def test_a_command_that_asks_a_router_is_done(found, fleet, capsys):
    """Against simulated engines. Those that trust a certificate are only parsed here: test_instances.py runs them."""
    name, *arguments = (fleet.get(word, PLACES.get(word, word)) for word in found)
    arguments = [re.sub("^pdrelay-[0-9a-f]{32}$", fleet["NAME"], word) for word in arguments]

    code = main([name, "--router", fleet["router"], *arguments])

    assert (code, capsys.readouterr().err) == (0, "")


CURL = argparse.ArgumentParser()
CURL.add_argument("-H", dest="headers", action="append", default=[])
CURL.add_argument("-d", dest="data")
for letter in "siNk":
    CURL.add_argument(f"-{letter}", action="store_true")
CURL.add_argument("url")


def _requests():
    for page in PAGES:
        text = page.read_text()
        for line in (*block_lines(text), *spans(text)):
            if line.startswith("curl -") and "http" in line.replace("localhost:", "http:"):
                yield pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:40]}")


@pytest.mark.parametrize("line", [*_requests()])
def test_a_request_is_answered(line, fleet):
    """With 200, by a router whose clients need a key, or by an engine, whose route /v1/pdrelay/kv_events is."""
    line = line.replace("$KEY", KEY).replace("$ADMIN_API_KEY", "sesame").partition(" | ")[0]
    for written, here in fleet.items():
        line = line.replace(written, here)
    args = CURL.parse_args(shlex.split(line)[1:])
    path = httpx.URL(args.url if "://" in args.url else f"http://{args.url}").path
    headers = dict(header.split(": ") for header in args.headers)
    if not headers:  # the page says where it needs a key
        headers["X-Api-Key"] = KEY
    at = fleet["HOST:PORT"] if path == "/v1/pdrelay/kv_events" else fleet["router"]

    with httpx.stream("POST" if args.data else "GET", f"http://{at}{path}", headers=headers, content=args.data) as got:
        assert got.status_code == 200
        if args.i:  # the page has readers look at it
            assert re.search("prefill;.*decode;", got.headers["server-timing"])


def _configurations():
    """Yield what pages give the connector, in vLLM's --kv-transfer-config, whole or in part."""
    for page in PAGES:
        for found in re.findall(r"""\{[^{}`]*"kv_connector"[^{}`]*(?:\{[^{}`]*\}[^{}`]*)?\}""", page.read_text()):
            yield pytest.param(found, id=f"{page.name}: {found[:60]}")
        for found in re.findall(r'("kv_connector_extra_config": ?\{[^{}]*\})', page.read_text()):
            yield pytest.param(f"{{{found}}}", id=f"{page.name}: {found}")


@pytest.mark.parametrize("text", [*_configurations()])
def test_a_configuration_of_the_connector_is_one(text):
    """Its own part through the reader of its settings, the roles and policies as vLLM spells them."""
    config = json.loads(text)

    module = config.pop("kv_connector_module_path", "pdrelay_connector")
    assert config.keys() <= {"kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"}
    assert importlib.util.find_spec(module)
    assert config.get("kv_role", "kv_both") in ("kv_producer", "kv_consumer", "kv_both")
    assert config.get("kv_load_failure_policy", "fail") in ("fail", "recompute")
    extra = config.get("kv_connector_extra_config", {})
    assert read_settings(extra, {})
    assert remarks(extra, {}) == []


def test_the_policy_of_ones_own_chooses():
    """The class is pasted, built of the parts that a router gives, and chooses the engine with the smaller load."""
    (block,) = blocks((ROOT / "docs/routing.md").read_text(), "python")
    namespace = {}
    exec(compile(ast.parse(block), "docs/routing.md", "exec"), namespace)

    policy = namespace["MyPolicy"](PolicyParts(load=len, dice=lambda n: 0, turn=0, caches=None))
    assert policy.copy().choose(["bbb", "a", "cc"]) == "a"
