"""The router in front of engines that know nothing of pdrelay: vLLM's own connectors move the KV
cache.
"""

import argparse
import os
import sys
from pathlib import Path

import httpx

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local import first_request
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.model_folder import prepare_model
from pdrelay_tools.local.plan import LocalPlan
from pdrelay_tools.local.preflight import check_packages
from pdrelay_tools.local.processes import Command, open_fleet
from pdrelay_tools.local.recipe import PYTHON_MODULE, Connector, EngineSpec, engine, shell_line

# In float32 an engine that decodes after a transfer and one that does everything agree to the last
# bit.
EXACT = ("--dtype", "float32")
MODEL_NAME = "tiny"  # what clients call the model


def main():
    args = read_arguments()
    with open_fleet(LocalPlan().log_dir) as fleet:
        prefill, decode = (
            (args.prefill, args.decode) if args.prefill else start_engines(fleet, args)
        )
        router_url = start_router(fleet, args.port, prefill, decode)

        mover = prefill if args.mode is TransferMode.PUSH else decode  # it counts the bytes
        answer = first_request.send_first_request(router_url, [f"http://{mover}"], MODEL_NAME)
        alone = ask_one_engine(f"http://{decode}")

    print(f"through both:     {answer.text!r}")
    print(f"one engine alone: {alone!r}")
    print(f"prefill by {answer.legs['prefill'].engine}, decode by {answer.legs['decode'].engine}")
    print(
        f"{answer.seconds:.1f} s, "
        f"{'unknown' if answer.bytes_moved is None else answer.bytes_moved} bytes of KV moved"
    )
    if answer.text != alone:
        sys.exit("stock: the answers differ")
    if answer.bytes_moved == 0:
        sys.exit("stock: the decode engine computed the prompt itself")


def ask_one_engine(url):
    """The same question to the decode engine, which must not use what it was sent a moment ago."""
    body = {**first_request.request_body(MODEL_NAME), "cache_salt": "alone"}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False
    ).raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def start_engines(fleet, args):
    """Two `vllm serve`; on a machine with an accelerator, these lines without the options for
    CPUs.
    """
    check_packages(Connector.NIXL)
    prepare_model(args.model)
    specs = [
        EngineSpec(
            name=f"stock-{role.value}",
            port=port,
            model=args.model,
            served_name=MODEL_NAME,
            role=role,
            connector=Connector.NIXL,
            mode=args.mode,
            side_channel_port=side_channel_port,
            extra_args=EXACT,
        )
        for role, port, side_channel_port in (
            (Role.PREFILL, args.prefill_port, args.side_channel_port),
            (Role.DECODE, args.decode_port, args.side_channel_port + 1),
        )
    ]
    engines = [fleet.start(engine(spec, os.environ)) for spec in specs]
    print(
        "starting two engines, most of a minute on two cores:", *map(shell_line, specs), sep="\n  "
    )
    fleet.wait_ready(engines)
    return [spec.address for spec in specs]


def start_router(fleet, port, prefill, decode):
    arguments = ["serve", "--port", str(port), "--prefill", prefill, "--decode", decode]
    print(f"starting the router:\n  pdrelay {' '.join(arguments)}")
    url = f"http://127.0.0.1:{port}"
    router = fleet.start(
        Command(
            "stock-router",
            [*PYTHON_MODULE, "pdrelay_proxy.cli", *arguments],
            os.environ,
            f"{url}/health",
        )
    )
    fleet.wait_ready([router])
    return url


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prefill",
        metavar="HOST:PORT",
        help="a running engine, started like the line that is shown",
    )
    parser.add_argument("--decode", metavar="HOST:PORT", help="another one")
    parser.add_argument(
        "--kv-transfer-mode",
        dest="mode",
        type=TransferMode,
        choices=[*TransferMode],
        default=TransferMode.PULL,
    )
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--prefill-port", type=int, default=8100)
    parser.add_argument("--decode-port", type=int, default=8200)
    parser.add_argument("--side-channel-port", type=int, default=5600)
    parser.add_argument("--model", type=Path, default=LocalPlan().model)
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
