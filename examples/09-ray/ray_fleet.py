"""A router and engines as actors of a Ray cluster.

Each engine has its GPUs, on any node that has them: `engine.sh` starts vLLM there and has the router send it requests.
The router is on the node of this driver.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ENGINE_SH = Path(__file__).resolve().parent.parent / "engine.sh"
LEAVE_S = 630  # engine.sh waits 600 s for requests and KV
END_S = 60  # vLLM gets 20 s after SIGTERM


class Process:
    """A program that runs where its actor does, and ends with it."""

    def __init__(self):
        self._process = None

    def address(self):
        """Of this node, as the cluster knows it."""
        return ray.util.get_node_ip_address()

    def start(self, argv, env):
        self._process = subprocess.Popen(argv, env=os.environ | env)
        return self._process.pid

    def exit_code(self):
        return self._process.poll() if self._process else None

    def end(self, seconds):
        """SIGTERM, and SIGKILL after so many seconds; returns the exit code."""
        if self._process is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Engine(Process):
    """vLLM, by the verbs of engine.sh."""

    def serve(self, env):
        """Start it and wait until the router sends it requests; returns HOST:PORT."""
        self._env = env | {"ADDRESS": self.address()}
        self.start([str(ENGINE_SH), "run"], self._env)
        subprocess.run([str(ENGINE_SH), "join"], env=os.environ | self._env, check=True)
        return f"{self.address()}:{env['PORT']}"

    def again(self):
        """Start it once more at its address, for the router knows it there; returns its process."""
        return self.start([str(ENGINE_SH), "run"], self._env)

    def leave(self):
        """Have the router drain and forget it, then end it."""
        done = subprocess.run([str(ENGINE_SH), "leave"], env=os.environ | self._env, check=False, timeout=LEAVE_S)
        self.end(END_S)
        return done.returncode


def here():
    """Ray's word for: on the node of this driver."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def start_router(args):
    secrets = args.secrets
    router = ray.remote(Process).options(num_cpus=1, scheduling_strategy=here()).remote()
    url = f"http://{ray.get(router.address.remote())}:{args.port}"
    argv = [args.xpyd, "serve", "--host", args.host, "--port", str(args.port), "--shutdown-timeout", "600"]
    argv += ["--api-keys-file", f"{secrets}/client-keys", "--admin-key-file", f"{secrets}/admin-key"]
    argv += ["--prefill-api-key-file", f"{secrets}/engine-key", "--decode-api-key-file", f"{secrets}/engine-key"]
    ray.get(router.start.remote([*argv, *args.router_args.split()], {}))
    return router, url


def start_engines(args, url):
    env = {"MODEL": args.model, "SERVED_NAME": args.served_name or args.model, "SECRETS": str(args.secrets)}
    env |= {"XPYD_ROUTER": url, "TENSOR_PARALLEL": str(max(1, args.gpus)), "ENGINE_ARGS": args.engine_args}
    env |= {"XPYD": args.xpyd, "VLLM": args.vllm}
    kind = ray.remote(Engine).options(num_gpus=args.gpus, num_cpus=args.cpus, max_concurrency=2)
    roles = ["prefill"] * args.prefill + ["decode"] * args.decode
    engines = [kind.remote() for _ in roles]
    served = []
    for i, (engine, role) in enumerate(zip(engines, roles, strict=True)):  # no two share a port, whatever node has them
        ports = {"PORT": str(args.first_port + i), "SIDE_PORT": str(args.first_port + 500 + i)}
        served.append(engine.serve.remote(env | {"ROLE": role} | ports))
    for role, address in zip(roles, ray.get(served), strict=True):
        print(f"{role} {address}", flush=True)
    return engines


def watch(router, engines):
    """Return when the router has ended; an engine that has ended begins again."""
    while router is None or ray.get(router.exit_code.remote()) is None:
        for engine in engines:
            if (code := ray.get(engine.exit_code.remote())) is not None:
                print(f"an engine has ended with {code} and begins again", flush=True)
                ray.get(engine.again.remote())
        time.sleep(5)


def main():
    args = read_arguments()
    ray.init(address=args.address)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ray job stop; ray.init has a handler of its own
    router, url = (None, args.router) if args.router else start_router(args)
    engines = []
    try:
        engines = start_engines(args, url)
        print(f"clients ask {url}", flush=True)
        if not args.once:
            watch(router, engines)
            sys.exit("ray_fleet: the router has ended")
    finally:
        end(router, engines)


def end(router, engines):
    """Requests first: the router serves what it has, and takes nothing new; one of others drains these engines."""
    if router is not None:
        ray.get(router.end.remote(610))
        ray.kill(router)
    ended = [engine.leave.remote() if router is None else engine.end.remote(END_S) for engine in engines]
    ray.get(ended)
    for engine in engines:
        ray.kill(engine)
    print("over", flush=True)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="what vllm serve is given")
    parser.add_argument("--served-name", help="the name that clients say (the model's)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument("--gpus", type=int, default=1, help="of one engine (--tensor-parallel-size)")
    parser.add_argument("--cpus", type=float, default=4, help="of one engine")
    parser.add_argument("--engine-args", default="", help="more arguments of vllm serve")
    parser.add_argument("--secrets", type=Path, default=Path.home() / ".config/xpyd", help="directory, on all nodes")
    parser.add_argument("--host", default="0.0.0.0", help="where the router listens")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument("--first-port", type=int, default=8100, help="of the engines; those of two drivers lie apart")
    parser.add_argument("--xpyd", default="xpyd", help="the program, on all nodes")
    parser.add_argument("--vllm", default="vllm", help="the program, on all nodes")
    parser.add_argument("--router-args", default="", help="more arguments of xpyd serve")
    parser.add_argument("--router", metavar="URL", help="add engines to this router instead of starting one")
    parser.add_argument("--address", default="auto", help="of the Ray cluster; local starts one here")
    parser.add_argument("--once", action="store_true", help="end when all engines have joined")
    return parser.parse_args()


if __name__ == "__main__":
    main()
