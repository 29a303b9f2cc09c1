"""A router and engines as actors of a Ray cluster.

Each engine has its GPUs, on any node that has them: `engine.sh` starts vLLM there and has the
router send it requests. The router is on the node of this driver.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ENGINE_SH = Path(__file__).resolve().parent.parent / "engine.sh"
LEAVE_S = 630  # engine.sh waits 600 s for requests and KV
END_S = 60  # vLLM gets 20 s after SIGTERM
REACH_S = 10  # an actor that does not answer within these waits for a node, or its node is lost


class Process:
    """A program that runs where its actor does, and ends with it."""

    def __init__(self):
        self._process, self._is_over = None, False
        self._lock = threading.Lock()  # an actor starts and is ended in two threads

    def address(self):
        """Of this node, as the cluster knows it."""
        return ray.util.get_node_ip_address()

    def start(self, argv, env):
        """Return the process's pid. Raises RuntimeError: it was ended before it began."""
        with self._lock:
            if self._is_over:
                raise RuntimeError(f"{argv[0]} is not started: the fleet ends")
            self._process = subprocess.Popen(argv, env=os.environ | env)
            return self._process.pid

    def exit_code(self):
        return self._process.poll() if self._process else None

    def end(self, seconds):
        """SIGTERM, and SIGKILL after so many seconds; returns the exit code."""
        with self._lock:
            self._is_over = True
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

    def __init__(self):
        super().__init__()
        self._join = None

    def serve(self, env):
        """Start it, wait until the router sends it requests, return HOST:PORT.

        Raises RuntimeError: it did not join.
        """
        self._env = env | {"ADDRESS": self.address()}
        pid = self.start([str(ENGINE_SH), "run"], self._env)
        self._join = subprocess.Popen(
            [str(ENGINE_SH), "join"], env=os.environ | self._env | {"MAINPID": str(pid)}
        )
        while self._join.poll() is None:
            # a process that has ended stays, for engine.sh, until its exit code is read
            self._process.poll()
            time.sleep(1)
        if self._join.returncode:
            raise RuntimeError(f"the engine at {self.address()}:{env['PORT']} has not joined")
        return f"{self.address()}:{env['PORT']}"

    def again(self):
        """Start it once more at its address, for the router knows it there; returns its process."""
        return self.start([str(ENGINE_SH), "run"], self._env)

    def leave(self):
        """Have the router drain and forget it, then end it; nothing is drained that has not
        joined.
        """
        if self._join is not None and self._join.poll() == 0:
            subprocess.run(
                [str(ENGINE_SH), "leave"], env=os.environ | self._env, check=False, timeout=LEAVE_S
            )
        return self.end(END_S)

    def end(self, seconds):
        """Like that of a process; an engine that has not joined does not join any more."""
        if self._join is not None and self._join.poll() is None:
            self._join.terminate()
        return super().end(seconds)


def here():
    """Ray's word for: on the node of this driver."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def start_router(args):
    secrets = args.secrets
    router = ray.remote(Process).options(num_cpus=1, scheduling_strategy=here()).remote()
    tls = (secrets / "tls.crt").exists()
    url = f"{'https' if tls else 'http'}://{ray.get(router.address.remote())}:{args.port}"
    argv = [args.pdrelay, "serve", "--host", args.host, "--port", str(args.port)]
    argv += ["--shutdown-timeout", "600", "--api-keys-file", f"{secrets}/client-keys"]
    argv += ["--admin-key-file", f"{secrets}/admin-key", "--join-key-file", f"{secrets}/join-key"]
    for role in ("prefill", "decode"):
        argv += [f"--{role}-api-key-file", f"{secrets}/engine-key"]
    argv += ["--tls-cert", f"{secrets}/tls.crt", "--tls-key", f"{secrets}/tls.key"] if tls else []
    ray.get(router.start.remote([*argv, *args.router_args.split()], {}))
    return router, url


def start_engines(args, url, engines):
    """Start them and wait until all serve.

    Each is put into the list first: it has to be ended even if others fail.
    """
    env = {
        "MODEL": args.model,
        "SERVED_NAME": args.served_name or args.model,
        "SECRETS": str(args.secrets),
        "PDRELAY_ROUTER": url,
        "TENSOR_PARALLEL": str(max(1, args.gpus)),
        "ENGINE_ARGS": args.engine_args,
        "PDRELAY": args.pdrelay,
        "VLLM": args.vllm,
    }
    env |= {"PDRELAY_ROUTER_PIN": f"{args.secrets}/tls.crt"} if url.startswith("https:") else {}
    kind = ray.remote(Engine).options(num_gpus=args.gpus, num_cpus=args.cpus, max_concurrency=2)
    roles = ["prefill"] * args.prefill + ["decode"] * args.decode
    served = []
    for i, role in enumerate(roles):  # no two share a port, whatever node has them
        ports = {"PORT": str(args.first_port + i), "SIDE_PORT": str(args.first_port + 500 + i)}
        engines.append(kind.remote())
        served.append(engines[i].serve.remote(env | {"ROLE": role} | ports))
    for role, address in zip(roles, ray.get(served), strict=True):
        print(f"{role} {address}", flush=True)


def watch(router, engines):
    """Return when the router has ended.

    An engine that has ended begins again; the router ejects one that is lost.
    """
    lost = set()
    while router is None or ray.get(router.exit_code.remote()) is None:
        for i, engine in enumerate(engines):
            try:
                if (code := ray.get(engine.exit_code.remote())) is not None:
                    print(f"engine {i} has ended with {code} and begins again", flush=True)
                    ray.get(engine.again.remote())
                lost.discard(i)
            except ray.exceptions.RayActorError as error:
                if i not in lost:
                    print(f"engine {i} cannot be reached, the others go on: {error}", flush=True)
                lost.add(i)
        time.sleep(5)


def main():
    args = read_arguments()
    ray.init(address=args.address)
    # ray job stop; ray.init has a handler of its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    router, url = (None, args.router) if args.router else start_router(args)
    engines = []
    try:
        start_engines(args, url, engines)
        print(f"clients ask {url}", flush=True)
        if not args.once:
            watch(router, engines)
            sys.exit("ray_fleet: the router has ended")
    finally:
        end(router, engines)


def end(router, engines):
    """Requests first: the router serves what it has, and takes nothing new; one of others drains
    these engines.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if router is not None:
        finish("the router", router, router.end.remote(610), 620)
    reached = [engine.exit_code.remote() for engine in engines]
    present = ray.wait(reached, num_returns=len(reached), timeout=REACH_S)[0] if engines else []
    ended = [
        engine.leave.remote() if router is None else engine.end.remote(END_S) for engine in engines
    ]
    for i, engine in enumerate(engines):
        finish(
            f"engine {i}", engine, ended[i], LEAVE_S + END_S + 10 if reached[i] in present else 0
        )
    print("over", flush=True)


def finish(name, actor, ended, seconds):
    """Wait at most so long for what an actor started, then end the actor.

    One that is lost keeps no other.
    """
    try:
        ray.get(ended, timeout=seconds)
    except ray.exceptions.RayError as error:
        print(f"{name} has not ended by itself: {error!r}", flush=True)
    ray.kill(actor)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="what vllm serve is given")
    parser.add_argument("--served-name", help="the name that clients say (the model's)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument(
        "--gpus", type=int, default=1, help="of one engine (--tensor-parallel-size)"
    )
    parser.add_argument("--cpus", type=float, default=4, help="of one engine")
    parser.add_argument("--engine-args", default="", help="more arguments of vllm serve")
    parser.add_argument(
        "--secrets",
        type=Path,
        default=Path.home() / ".config/pdrelay",
        help="directory, on all nodes",
    )
    parser.add_argument("--host", default="0.0.0.0", help="where the router listens")
    parser.add_argument("--port", type=int, default=8000, help="of the router")
    parser.add_argument(
        "--first-port",
        type=int,
        default=8100,
        help="of the engines; those of two drivers lie apart",
    )
    parser.add_argument("--pdrelay", default="pdrelay", help="the program, on all nodes")
    parser.add_argument("--vllm", default="vllm", help="the program, on all nodes")
    parser.add_argument("--router-args", default="", help="more arguments of pdrelay serve")
    parser.add_argument(
        "--router", metavar="URL", help="add engines to this router instead of starting one"
    )
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster; local starts one here"
    )
    parser.add_argument("--once", action="store_true", help="end when all engines have joined")
    return parser.parse_args()


if __name__ == "__main__":
    main()
