"""Grow a running cluster by one decode engine, without restarting anything."""

import argparse
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.first_request import request_body
from pdrelay_tools.local.model_folder import prepare_model
from pdrelay_tools.local.plan import EngineKind, LocalPlan, engine_command
from pdrelay_tools.local.preflight import check_packages, safe_dtype
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector, with_secret
from pdrelay_tools.served_by import parse_server_timing

REQUESTS = 6


def main():
    args = read_arguments()
    key = os.environ.get("ADMIN_API_KEY") or own_key()
    if not key:
        sys.exit("add_instance: set ADMIN_API_KEY to the value that the router was started with")

    with (
        httpx.Client(
            base_url=args.router, timeout=120, trust_env=False, headers={"X-Api-Key": key}
        ) as router,
        decode_engine(args, model := served_model(router), mode_of_fleet(router)) as address,
    ):
        before = status(router)
        print(
            f"before: {before['prefill_node_count']} prefill, {before['decode_node_count']} decode"
        )
        if args.engine == EngineKind.VLLM:  # simulated engines have no KV
            prove_that_kv_moves(before["prefill_nodes"], address)

        with added(router, address, forget=not args.instance):
            after = status(router)
            print(
                f"after:  {after['prefill_node_count']} prefill, {after['decode_node_count']} "
                f"decode"
            )

            # The question changes, so that no engine answers from its prefix cache.
            served = Counter(
                ask(router, model, f"Question {number}: where does the river end?")
                for number in range(REQUESTS)
            )
            for engine, count in sorted(served.items()):
                print(f"{engine} decoded {count} of {REQUESTS} requests")
            if len(served) < after["decode_node_count"]:
                sys.exit(
                    f"add_instance: only {len(served)} of {after['decode_node_count']} decode "
                    f"engines served"
                )

            if not args.instance and not args.once:
                print(
                    "The new engine serves until Ctrl-C, which takes it out of the router before "
                    "it ends."
                )
                wait_for_ctrl_c()


def own_key():
    """The key that `make up` has drawn in this folder."""
    file = LocalPlan().key_file
    return file.read_text().strip() if file.is_file() else None


def prove_that_kv_moves(prefills, address):
    """Ask as `pdrelay check` does: an answer proves nothing, for an engine that gets no KV computes
    prompts itself.
    """
    words = ["check", "--prefill", *prefills, "--decode", address, "--seconds", "60"]
    print("$ pdrelay", *words)
    checked = subprocess.run(
        [sys.executable, "-P", "-m", "pdrelay_proxy.cli", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(checked.stdout, end="")
    if checked.returncode:
        reasons = [
            line.partition(" ")[2].strip()
            for line in checked.stdout.splitlines()
            if not line.startswith("ok ")
        ]
        sys.exit(
            f"add_instance: {address} was not added, because no KV reaches it: "
            f"{reasons[0] if reasons else '?'}"
        )


@contextmanager
def added(router, address, *, forget):
    """The router asks the new engine for its model, and takes it when that is the model of the
    others.
    """
    engine = {"type": "decode", "instance": address}
    answer = router.post("/instances/add", json=engine)
    if not answer.is_success:
        reason = answer.headers.get("x-pdrelay-reason", answer.text)
        sys.exit(f"add_instance: the router did not take {address}: {answer.status_code} {reason}")
    print(answer.json()["message"])
    try:
        yield
    finally:
        if forget:
            with suppress(httpx.TransportError):  # the router may have ended first
                router.post("/instances/remove", json=engine)


def served_model(router):
    """Return the name of the model that the other engines serve; `make up` keeps it in a folder of
    that name.
    """
    return router.get("/v1/models").raise_for_status().json()["data"][0]["id"]


def ask(router, model, question):
    """Return the name of the engine that decoded."""
    answer = router.post("/v1/chat/completions", json=request_body(model, question, max_tokens=8))
    answer.raise_for_status()
    return parse_server_timing(answer.headers["server-timing"])["decode"].engine


def status(router):
    return router.get("/status").raise_for_status().json()


def mode_of_fleet(router):
    """Return how the other engines move KV: all engines of a fleet do it in one way."""
    answer = router.get("/instances")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        sys.exit(
            "add_instance: the router has another admin key: set ADMIN_API_KEY to the value it was "
            "started with"
        )
    rows = answer.raise_for_status().json()["instances"]
    return next((EngineMode(row["mode"]) for row in rows if row["mode"]), EngineMode.PULL)


@contextmanager
def decode_engine(args, model, mode):
    """Give the address of a decode engine: of the one that was named, or of a new one."""
    if args.instance:
        yield args.instance
        return
    folder = args.model or LocalPlan().model.with_name(model)
    kind = EngineKind(args.engine)
    connector = Connector(args.connector)
    plan = LocalPlan(
        kind=kind,
        connector=connector,
        mode=mode,
        reuse_kv=True,  # as `make up` has it
        model=folder,
        decode_port=args.port,
        dtype=safe_dtype(),
    )
    spec = replace(plan.engines()[-1], name="decode-new", side_channel_port=args.side_channel_port)
    if plan.kind is EngineKind.VLLM:
        check_packages(spec.connector)
        prepare_model(folder)
    # The secret that `make up` has drawn in this folder; the operator's own comes first.
    environment = (
        with_secret(os.environ, plan.secret_file) if plan.secret_file.is_file() else os.environ
    )
    with open_fleet(plan.log_dir) as fleet:
        engine = fleet.start(engine_command(plan, spec, environment))
        print(f"starting a decode engine on {spec.address}, log {engine.log}")
        fleet.wait_ready([engine])
        yield spec.address


def wait_for_ctrl_c():
    try:
        while True:
            input()
    except (KeyboardInterrupt, EOFError):
        print()


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="http://127.0.0.1:8000", help="its URL (%(default)s)")
    parser.add_argument(
        "--instance", metavar="HOST:PORT", help="add this running engine instead of starting one"
    )
    parser.add_argument("--engine", choices=[kind.value for kind in EngineKind], default="vllm")
    parser.add_argument(
        "--connector", choices=[kind.value for kind in Connector], default="pdrelay"
    )
    parser.add_argument("--port", type=int, default=8299)
    parser.add_argument("--side-channel-port", type=int, default=5699)
    parser.add_argument("--model", type=Path, help="folder of the model (that of `make up`)")
    parser.add_argument("--once", action="store_true", help="stop the new engine at the end")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except LocalError as error:
        sys.exit(f"add_instance: {error}")
    except httpx.HTTPError as error:
        sys.exit(f"add_instance: the router failed: {error}")
