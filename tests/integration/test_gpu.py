"""The connector's core over memory of a device, between two processes: pull, push, leases, and GB/s.

It needs NIXL and torch, no vLLM. pytest runs it on the host's memory everywhere and on GPUs where there are any.
``python test_gpu.py --out FOLDER`` is the same on a bare machine (examples/05-gpu): all checks, then a table of rates.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # as a script: tests/support
from support.nixl_process import ALL, SHORT, NixlProcess, same
from support.transfer_rates import OPERATIONS, SIZES, measured

LIMIT = 480  # s for everything, as a script
LOCAL = {"UCX_NET_DEVICES": "lo"}  # otherwise UCX chooses: shared memory, CUDA IPC, TCP
GPU = (pytest.mark.gpu,)
PAIRS = [  # devices of P and D
    pytest.param(("cpu", "cpu"), id="cpu-cpu"),
    pytest.param(("cuda:0", "cuda:0"), id="gpu-gpu", marks=GPU),
    pytest.param(("cuda:0", "cpu"), id="gpu-cpu", marks=GPU),
    pytest.param(("cpu", "cuda:0"), id="cpu-gpu", marks=GPU),
    pytest.param(("cuda:0", "cuda:1"), id="gpu-other_gpu", marks=GPU),
]
# Torch is imported by each process: seconds of CPU.
pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(300)]
INTO = ALL[::-1]


def skip_without(*devices):
    """Only here torch is asked: CI imports it for no GPU that is not there."""
    if any(device.startswith("cuda") for device in devices):
        torch = pytest.importorskip("torch")
        if (have := torch.cuda.device_count()) <= max(int(device[5:]) for device in devices if device != "cpu"):
            pytest.skip(f"{have} CUDA devices")


@pytest.fixture(scope="module", params=PAIRS)
def devices(request):
    skip_without(*request.param)
    return request.param


@pytest.fixture(scope="module", params=["pull", "push"])
def pair(devices, request):
    """P and D in processes of their own; D has two ranks, so that P's blocks are cut, and each knows its mode."""
    p_device, d_device = devices
    more = {"mode": request.param, "ucx": LOCAL, "timeout": SHORT}  # one of the tests lets P hang
    with NixlProcess("p", device=p_device, **more) as p, NixlProcess("d", device=d_device, ranks=2, **more) as d:
        p.ready()
        yield request.param, p, d.ready()


@pytest.fixture
def moved(pair):
    """Have P's blocks moved into D's by a request of this name, in the pair's mode; return how the load ended."""
    mode, p, d = pair

    def moved(name, blocks, into):
        if mode == "pull":
            p.ask("lend", requests=[name])
            d.load(name, p, blocks, into)
        else:
            d.expect(name, p, into)
            half = len(blocks) // 2
            p.push(name, blocks[:half], last=False)
            p.push(name, blocks[half:])
        return d.result(name)

    return moved


def test_bytes_arrive_bit_exact_and_nothing_beside_them_is_touched(pair, moved):
    """All blocks, and scattered ones, from one rank into two."""
    _, p, d = pair
    p.ask("fill", seed=1)
    for name, blocks, into in (("all", ALL, INTO), ("some", ALL[3:40:3], INTO[::5])):
        d.ask("fill", seed=2)
        others = [block for block in ALL if block not in into]
        before = d.ask("digests", blocks=others)
        count = min(len(blocks), len(into))
        ended = moved(name, blocks[:count], into[:count])

        assert ended.failure == ""
        assert same(p, blocks[:count], d, into[:count])
        assert d.ask("digests", blocks=others + into[count:])["digests"][: len(others)] == before["digests"]


def test_a_block_that_was_written_again_is_moved_as_it_is_now(pair, moved):
    """NIXL registers memory once; neither side may see a copy of what was there then."""
    _, p, d = pair
    for number, value in enumerate((11, 12)):
        p.ask("paint", blocks=ALL[:8], value=value)

        assert moved(f"again-{number}", ALL[:8], ALL[8:16]).failure == ""
        assert same(p, ALL[:8], d, ALL[8:16])


@pytest.mark.parametrize("pair", ["pull"], indirect=True)
def test_without_a_lease_no_load_succeeds(pair):
    """P's blocks may be another request's by now: D computes, whatever the bytes are."""
    _, p, d = pair
    d.load("never-lent", p, ALL[:4], ALL[:4])

    assert d.result("never-lent").failure != ""


def test_a_load_of_a_peer_that_hangs_fails_in_time_and_the_next_one_succeeds(pair, moved):
    """Over CUDA IPC and shared memory the bytes come without P: the fence is what P must answer."""
    mode, p, d = pair
    assert moved("warm", ALL[:1], ALL[:1]).failure == ""
    if mode == "pull":
        p.ask("lend", requests=["hangs"])
    p.freeze()
    try:
        if mode == "pull":
            d.load("hangs", p, ALL[:8], ALL[:8])
        else:
            d.expect("hangs", p, ALL[:8])
        failed = d.result("hangs")
    finally:
        p.thaw()
    if failed.quarantined:
        d.released("hangs")

    assert failed.failure
    assert failed.seconds >= SHORT / 2
    p.ask("fill", seed=3)
    assert moved("after", ALL[:8], ALL[:8]).failure == ""
    assert same(p, ALL[:8], d, ALL[:8])


def test_the_script_prints_a_table_and_writes_what_it_found(tmp_path):
    """A machine with a GPU is often lent for minutes: one command, and one file to take home. Short and small here."""
    quick = ("--device", "cpu", "--checks", "lease", "--seconds", "0.01", "--mib", "16", "--transports", "any")
    ran = subprocess.run(
        [sys.executable, __file__, *quick, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    rates = found["rates"]

    assert ran.returncode == 0, ran.stderr + (tmp_path / "checks.log").read_text()
    assert [check["outcome"] for check in found["checks"].values()] == ["passed"]
    assert [(row["what"], row["bytes"]) for row in rates] == [
        ("copy host to host", 16 << 20),
        *((operation, size) for size in SIZES for operation in OPERATIONS),
    ]
    assert min(row["gb_per_s"] for row in rates) > 0
    assert ran.stdout.count(" READ ") == len(SIZES)
    assert found["faults"] == []


class Outcomes:
    """A pytest plugin: the outcome of each test, kept in a file that is whole at any time."""

    def __init__(self, file):
        self._file = Path(file)
        self._outcomes = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            words = "" if report.passed else str(report.longrepr)[-2000:]
            self._outcomes[name] = {"outcome": report.outcome, "words": words}
            self._file.write_text(json.dumps(self._outcomes))


def versions():
    """What ran here, and on what."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
    for name in ("torch", "numpy", "pdrelay", "nixl", "nixl-cu12", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def gpus_of(torch):
    return {
        "cuda of torch": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }


def checked(folder, chosen, timeout):
    """Run tests of this file in a process of its own; return its exit code, and the outcome of each that has ended."""
    file = folder / "checks.json"
    file.write_text("{}")
    argv = [sys.executable, __file__, "--only-checks", str(file), "-k", chosen]
    with (folder / "checks.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then ends the processes of its fixtures, even frozen ones
            try:
                code = process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    return code, json.loads(file.read_text())


def print_table(rows):
    print(f"{'UCX':<8} {'here':<7} {'peer':<7} {'what':<22} {'bytes':>10} {'count':>6} {'GB/s':>9} {'posting':>9}")
    for row in rows:
        posting = "" if row["posting_us"] is None else f"{row['posting_us']:.2f} us"
        where = f"{row['ucx']:<8} {row['device']:<7} {row['peer']:<7} {row['what']:<22}"
        print(f"{where} {row['bytes']:>10} {row['descriptors']:>6} {row['gb_per_s']:>9.3f} {posting:>9}")


def variables(transports, device):
    """Return what has UCX use these transports."""
    return {} if transports == "any" else {"UCX_TLS": "tcp" if device == "cpu" else "tcp,cuda_copy"}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda, if there is one")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for result.json and logs")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each rate")
    parser.add_argument("--mib", type=int, default=256, help="memory of each end, of each rate")
    parser.add_argument("--checks", default="", metavar="NAME", help="only tests of this name (pytest's -k)")
    parser.add_argument("--transports", nargs="+", choices=("any", "tcp"), default=("any", "tcp"), help="of UCX")
    parser.add_argument(
        "--ucx", action="append", default=[], metavar="NAME=VALUE", help="variable of UCX or NIXL for the rates"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything")
    args = parser.parse_args(argv)
    began = time.monotonic()
    count = 0
    about = versions()
    if args.device != "cpu":
        import torch

        count = torch.cuda.device_count()
        about |= gpus_of(torch)
    if args.device == "cuda" and not count:
        parser.exit(2, f"test_gpu: --device is cuda, and torch {about['torch']} finds no CUDA device here\n")
    devices = [f"cuda:{number}" for number in range(min(count, 2))] or ["cpu"]
    args.out.mkdir(parents=True, exist_ok=True)

    chosen = f"{'cpu-cpu' if devices == ['cpu'] else 'not script'} and ({args.checks or 'test_'})"
    code, checks = checked(args.out, chosen, args.limit * 0.5)
    for name, check in checks.items():
        print(f"{check['outcome']:<8} {name}")
    pairs = [("cpu", "cpu")] if devices == ["cpu"] else [("cuda:0", peer) for peer in (*devices, "cpu")]
    rows = []
    faults = [] if code == 0 else [f"the checks ended with exit code {code}: see checks.log"]
    for device, peer in pairs:
        for name in args.transports:
            ucx = variables(name, device) | dict(each.split("=", 1) for each in args.ucx)
            left = args.limit - (time.monotonic() - began)
            found, fault = measured(device, peer, seconds=args.seconds, mib=args.mib, ucx=ucx, timeout=max(left, 1))
            rows += [{"ucx": name, **row} for row in found]
            faults += [f"rates with UCX {name}: {fault}"] if fault else []
    print_table(rows)
    seconds = time.monotonic() - began
    whole = {"versions": about, "ucx": args.ucx, "seconds": seconds, "checks": checks, "rates": rows, "faults": faults}
    (args.out / "result.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{json.dumps(about)}\n{seconds:.0f} s; {args.out / 'result.json'}")
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only-checks"]:
        # Without a configuration: this folder may lie in a checkout, whose pytest has plugins that are not here.
        alone = ["-c", os.devnull, "-p", "no:cacheprovider", "-q", "-ra", "--tb=short"]
        alone += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        sys.exit(pytest.main([__file__, *alone, *sys.argv[3:]], plugins=[Outcomes(sys.argv[2])]))
    sys.exit(main(sys.argv[1:]))
