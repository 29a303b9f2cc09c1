"""examples/05-gpu: its script runs here with a pretended nvidia-smi, simulated engines, and NIXL on host memory."""

import runpy
import sys
import tarfile
import zipfile

import pytest

from support.bare_metal import EXAMPLES, ROOT, new_site, processes_of, program, run
from support.cluster import free_ports

SCRIPT = EXAMPLES / "05-gpu" / "gpu.sh"
SECRETS = ("connector-secret", "engine-key", "admin-key", "client-key")
BENCH = "Serving Benchmark Result"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
]
with_processes = [pytest.mark.slow, pytest.mark.nixl]  # a router and engines start; the doctor moves bytes


class Machine:
    """A machine with so many GPUs, as the script sees it."""

    def __init__(self, folder, gpus, *, has_prove=False):
        self.site = new_site(folder)
        self.out = folder / "run"
        listed = "; ".join(f"echo {number}" for number in range(gpus))
        program(
            self.site,
            "nvidia-smi",
            f'case "$*" in *query-gpu=index*) {listed or "exit 6"} ;; *) echo GPU0 X NV18 ;; esac',
        )
        vllm = f"{sys.executable} -P {ROOT}/tests/support/pretended_vllm.py"
        bench = f'echo "{BENCH}"; echo "$OPENAI_API_KEY|$*" >>{folder}/bench'
        program(self.site, "vllm", f'case $1 in bench) {bench} ;; --version) echo 0 ;; *) exec {vllm} "$@" ;; esac')
        # No GPU is here: the doctor's ends move memory of the host. Without a pretended one there is no pdrelay prove.
        cli = f'exec {sys.executable} -P -m pdrelay_proxy.cli "$@"'
        cpu = 'doctor*) set -- $(echo "$*" | sed s/cuda:0/cpu/) ;;'
        proves = (
            f'prove*) echo "$*" >>{folder}/proved; [ $2 = --help ] || exit ${{PROVE_FAILS:-0}}; exit 0 ;;'
            if has_prove
            else "prove*) exit 2 ;;"
        )
        program(self.site, "pdrelay", f'case "$*" in {cpu} {proves} esac\n{cli}')
        names = ("ROUTER_PORT", "PREFILL_PORT", "DECODE_PORT", "DOCTOR_PORT", "SIDE_PORT")
        self.ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))

    def run(self, command, **more):
        environment = {
            **self.site.environment, **self.ports, "OUT": str(self.out), "READY_S": "150", "PYTHON": sys.executable,
            "STEPS": "start prove doctor benchmark collect", **more,
        }  # fmt: skip
        return run(["bash", str(SCRIPT), command], environment, timeout=300)

    def started(self, role):
        return self.site.given(self.ports[f"{role}_PORT"])

    def left(self):
        """Return the processes of what the script began, by its files."""
        groups = [int(path.read_text().split()[0]) for path in self.out.glob("pids/*")]
        return [pid for group in groups for pid in processes_of(group)]


@pytest.fixture
def machine(tmp_path):
    found = Machine(tmp_path, 2)
    yield found
    found.run("stop")


class TestEverything:
    """One command, from nothing to an archive."""

    pytestmark = with_processes

    def test_all_leaves_an_archive_without_secrets_and_no_process(self, machine, tmp_path):
        """The engines are on two GPUs; and what a stranger is sent has no key in it.

        ``check`` is left out: tests/integration/test_gpu.py runs its script.
        """
        done = machine.run("all", MODE="push")
        secrets = [(machine.out / "secrets" / name).read_text().strip() for name in SECRETS]
        with tarfile.open(f"{machine.out}.tar.gz") as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}

        assert done.returncode == 0, done.stdout + done.stderr
        prefill, decode = (machine.started(role) for role in ("PREFILL", "DECODE"))
        assert [engine["env"]["CUDA_VISIBLE_DEVICES"] for engine in (prefill, decode)] == ["0", "1"]
        assert [
            engine["argv"][engine["argv"].index("--gpu-memory-utilization") + 1] for engine in (prefill, decode)
        ] == ["0.85"] * 2
        assert '"mode": "push"' in prefill["argv"][prefill["argv"].index("--kv-transfer-config") + 1]
        assert {
            "results/first.json", "results/doctor.json", "results/doctor-engine.json", "results/prove.txt",
            "about/topology.txt", "about/metrics-router.txt", "about/metrics-decode.txt",
            "about/packages.txt", "logs/prefill.log", "logs/router.log", "logs/bench-decode.log",
        } <= set(files)  # fmt: skip
        assert b"pdrelay_requests_total" in files["about/metrics-router.txt"]
        assert [name for name, content in files.items() for secret in secrets if secret.encode() in content] == []
        asked = (tmp_path / "bench").read_text().splitlines()
        assert [line.partition("|")[0] for line in asked] == [secrets[3], secrets[1]]
        assert all(secret not in line.partition("|")[2] for line in asked for secret in secrets)
        assert machine.left() == []


def test_both_engines_share_one_gpu_and_what_cannot_start_leaves_nothing(tmp_path):
    """The log's end is shown at once, not after a quarter of an hour."""
    machine = Machine(tmp_path, 1)
    program(machine.site, "vllm", f'echo "$CUDA_VISIBLE_DEVICES $*" >>{tmp_path}/asked; echo no such model; exit 3')
    done = machine.run("start")

    assert done.returncode == 1
    assert "no such model" in done.stderr
    assert "prefill has ended" in done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["0"] * len(asked)
    assert all("--gpu-memory-utilization 0.4" in line for line in asked)
    assert machine.left() == []


@pytest.mark.parametrize(
    ("gpus", "command", "more", "said"),
    [
        (0, "start", {}, "nvidia-smi lists no GPU"),
        (2, "start", {"GPUS": "0 7"}, "GPU 7 is not one of: 0 1"),
        (2, "start", {"GPUS": "0 1 0"}, "must be one or two numbers"),
        (2, "start", {"MODE": "both"}, "MODE is both, and must be pull, push or auto"),
        (2, "begin", {}, "'begin' is not start"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(tmp_path, gpus, command, more, said):
    """And before anything starts."""
    done = Machine(tmp_path, gpus).run(command, **more)

    assert done.returncode != 0
    assert said in done.stderr


def test_pdrelay_prove_gets_the_engines_and_their_keys_as_files(tmp_path):
    """Where this version has it. Its findings fail the step, and the report is in the archive."""
    machine = Machine(tmp_path, 2, has_prove=True)
    assert machine.run("prove").returncode == 0
    asked = (tmp_path / "proved").read_text().splitlines()[-1].split()
    failed = machine.run("prove", PROVE_FAILS="1")

    engines = {f"http://127.0.0.1:{machine.ports[f'{role}_PORT']}" for role in ("PREFILL", "DECODE")}
    key = str(machine.out / "secrets/engine-key")
    assert {asked[asked.index("--prefill") + 1], asked[asked.index("--decode") + 1]} == engines
    assert [asked[asked.index(f"--{role}-key-file") + 1] for role in ("prefill", "decode")] == [key, key]
    assert str(machine.out / "results/prove.html") in asked
    assert failed.returncode == 1
    assert "ends with exit code 1" in failed.stderr


def test_no_archive_is_made_of_a_log_with_a_secret(tmp_path):
    """People post archives."""
    machine = Machine(tmp_path, 1)
    assert machine.run("collect").returncode == 0
    (tmp_path / "run.tar.gz").unlink()
    secret = (machine.out / "secrets/engine-key").read_text()
    (machine.out / "logs/prefill.log").write_text(f"the key is {secret}.")
    done = machine.run("collect")

    assert done.returncode == 1
    assert "engine-key stands in" in done.stderr
    assert not (tmp_path / "run.tar.gz").exists()


def test_secrets_are_their_owners_alone(tmp_path):
    """Other users of a machine with GPUs are the rule."""
    machine = Machine(tmp_path, 1)
    machine.run("collect")

    modes = [path.stat().st_mode & 0o777 for path in (machine.out, *(machine.out / "secrets").iterdir())]
    assert modes == [0o700] + [0o600] * (len(SECRETS) + 1)


def test_what_no_check_uses_leaves_the_wheel_and_its_list(tmp_path):
    """NIXL's wheel alone is larger than what may be carried to such a machine."""
    whole = tmp_path / "nixl_cu13-1-py3-none-any.whl"
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("nixl_cu13/a.py", "1")
        wheel.writestr("nixl_ep_cu13/b.so", "2")
        wheel.writestr("nixl_cu13-1.dist-info/RECORD", "nixl_cu13/a.py,,\nnixl_ep_cu13/b.so,,\n")
    runpy.run_path(str(SCRIPT.with_name("wheels.py")))["without"](whole, "nixl_ep")

    with zipfile.ZipFile(whole) as wheel:
        assert wheel.namelist() == ["nixl_cu13/a.py", "nixl_cu13-1.dist-info/RECORD"]
        assert wheel.read("nixl_cu13-1.dist-info/RECORD") == b"nixl_cu13/a.py,,\n"
