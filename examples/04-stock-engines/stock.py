"""The router in front of engines that know nothing of xpyd: vLLM's own NixlConnector moves the KV cache."""

import argparse
import os
import sys
import time
from pathlib import Path

import httpx

from xpyd_proxy.core.model import Role
from xpyd_proxy.local.errors import LocalError
from xpyd_proxy.local.first_request import parse_server_timing, request_body
from xpyd_proxy.local.model import ensure_model
from xpyd_proxy.local.plan import MODEL_NAME, Plan
from xpyd_proxy.local.processes import Command, open_fleet
from xpyd_proxy.local.recipe import PYTHON_MODULE, Connector, EngineSpec, engine, shell_line

# In float32 an engine that decodes after a transfer and one that does everything agree to the last bit.
EXACT = ("--dtype", "float32")


def main():
    args = read_arguments()
    with open_fleet(Plan().log_dir) as fleet:
        prefill, decode = (args.prefill, args.decode) if args.prefill else start_engines(fleet, args)
        router_url = start_router(fleet, args.port, prefill, decode)

        body = request_body(MODEL_NAME)
        with httpx.Client(timeout=120, trust_env=False) as client:
            expected = ask(client, f"http://{decode}", body).json()["choices"][0]["message"]["content"]
            start = time.monotonic()
            answer = ask(client, router_url, {**body, "cache_salt": "the decode engine must not know it"})
            seconds = time.monotonic() - start

        text = answer.json()["choices"][0]["message"]["content"]
        legs = parse_server_timing(answer.headers["server-timing"])
        print(f"one engine alone: {expected!r}")
        print(f"through both:     {text!r}")
        print(f"prefill by {legs['prefill'].engine}, decode by {legs['decode'].engine}, {seconds:.1f} s")
        if text != expected:
            sys.exit("stock: the answers differ")


def start_engines(fleet, args):
    """Two `vllm serve`; on a machine with an accelerator, these lines without the options for CPUs."""
    ensure_model(args.model)
    specs = [
        EngineSpec(
            name=f"stock-{role.value}",
            port=port,
            model=args.model,
            role=role,
            connector=Connector.NIXL,
            side_channel_port=side_channel_port,
            extra_args=EXACT,
        )
        for role, port, side_channel_port in (
            (Role.PREFILL, args.prefill_port, args.side_channel_port),
            (Role.DECODE, args.decode_port, args.side_channel_port + 1),
        )
    ]
    engines = [fleet.start(engine(spec, os.environ)) for spec in specs]
    print("starting two engines, most of a minute on two cores:", *map(shell_line, specs), sep="\n  ")
    fleet.wait_ready(engines)
    return [spec.address for spec in specs]


def start_router(fleet, port, prefill, decode):
    arguments = ["serve", "--port", str(port), "--prefill", prefill, "--decode", decode]
    print(f"starting the router:\n  xpyd {' '.join(arguments)}")
    url = f"http://127.0.0.1:{port}"
    router = fleet.start(
        Command("stock-router", [*PYTHON_MODULE, "xpyd_proxy.cli", *arguments], os.environ, f"{url}/health")
    )
    fleet.wait_ready([router])
    return url


def ask(client, url, body):
    return client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", metavar="HOST:PORT", help="a running engine, started like the line that is shown")
    parser.add_argument("--decode", metavar="HOST:PORT", help="another one")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--prefill-port", type=int, default=8100)
    parser.add_argument("--decode-port", type=int, default=8200)
    parser.add_argument("--side-channel-port", type=int, default=5600)
    parser.add_argument("--model", type=Path, default=Plan().model)
    args = parser.parse_args()
    if bool(args.prefill) != bool(args.decode):
        parser.error("give both --prefill and --decode, or neither")
    return args


if __name__ == "__main__":
    try:
        main()
    except LocalError as error:
        sys.exit(f"stock: {error}")
    except httpx.HTTPError as error:
        sys.exit(f"stock: a request failed: {error}")
