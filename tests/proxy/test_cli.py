"""The command line, up to the server it starts."""

import os
import re
import subprocess
import sys

import pytest

from pdrelay_proxy import server
from pdrelay_proxy.cli import build_parser, main
from pdrelay_proxy.commands.engine_sources import check_engines, warn_without_engines
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.pods.settings import PodSettings
from pdrelay_proxy.features.stores.settings import StoreSettings
from pdrelay_proxy.options import serve_settings
from pdrelay_proxy.settings import KvTransferMode, Settings

pytestmark = pytest.mark.processes


def settings_of(*argv):
    return serve_settings(build_parser(["serve"]).parse_args(["serve", *argv]))


def test_the_defaults_are_those_of_the_settings(monkeypatch):
    """There is one place where they are written."""
    monkeypatch.delenv("ADMIN_API_KEY", raising=False)

    assert settings_of() == Settings()


def test_every_flag_arrives(monkeypatch):
    """Addresses may be listed, repeated, or both."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    flags = "--prefill p0:1 p1:1 --decode d0:1 --prefill http://p2:1 --host :: --port 0 --max-body-bytes 10"
    more = "--connect-timeout 0.5 --first-token-timeout 60 --kv-transfer-mode push"
    most = "--retries 0"

    assert settings_of(*flags.split(), *more.split(), *most.split()) == Settings(
        prefill=("p0:1", "p1:1", "http://p2:1"),
        decode=("d0:1",),
        host="::",
        port=0,
        admin_key="sesame",
        kv_transfer_mode=KvTransferMode.PUSH,
        retries=0,
        max_body_bytes=10,
        connect_timeout_s=0.5,
        first_token_timeout_s=60.0,
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prefill", "nowhere"], "argument --prefill: 'nowhere' is not the address of an engine: write host:port"),
        (["--decode", "a:1", "http://b"], "argument --decode: 'http://b' is not the address of an engine: write"),
        (["--decode", "a:70000"], "argument --decode: 'a:70000' has port 70000, and a port is between 1 and 65535"),
        (["--port", "http"], "argument --port: 'http' is not a port: write a number from 0 to 65535"),
        (["--max-body-bytes", "0"], "argument --max-body-bytes: '0' is not a size: write a whole number of bytes"),
        (["--total-timeout", "0"], "argument --total-timeout: '0' is not a time: write a number of seconds"),
        (["--connect-timeout", "soon"], "argument --connect-timeout: 'soon' is not a time"),
        (["--queue-order", "maybe"], "argument --queue-order: 'maybe' is not a choice: write arrival or fair"),
        (["--retries", "-1"], "argument --retries: '-1' is not a number of retries: write one from 0 to 10"),
        (["--prefil", "a:1"], "pdrelay serve: unrecognized arguments: --prefil: did you mean --prefill?"),
        (["--connect_timeout_s=5"], "unrecognized arguments: --connect_timeout_s: did you mean --connect-timeout?"),
        (["--zzzz"], "pdrelay serve: unrecognized arguments: --zzzz\n"),
        (["--prefill"], "argument --prefill: expected at least one argument"),
    ],
)
def test_a_wrong_argument_is_one_sentence(argv, says, capsys):
    """It names the flag and the value and says what would be right; the exit code is that of a usage error."""
    try:
        code = main(["serve", *argv])
    except SystemExit as end:
        code = end.code

    assert code == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["up", "--prefil", "2"], "pdrelay up: unrecognized arguments: --prefil: did you mean --prefill?"),
        (
            ["instances", "--ruoter", "a:1", "list"],
            "pdrelay instances: unrecognized arguments: --ruoter: did you mean --router?",
        ),
        (
            ["instances", "drain", "decode-0", "--moev"],
            "pdrelay instances drain: unrecognized arguments: --moev: did you mean --move?",
        ),
        (["why", "--ruoter", "a:1", "x"], "did you mean --router?"),
        (["pairs", "--jsno"], "pdrelay pairs: unrecognized arguments: --jsno: did you mean --json?"),
        (["plan", "--promt-lengths", "x"], "did you mean --prompt-lengths?"),
        (["--verson", "serve"], "pdrelay: unrecognized arguments: --verson: did you mean --version?\n"),
        (["--zzzz", "serve"], "pdrelay: unrecognized arguments: --zzzz\n"),
    ],
)
def test_a_flag_that_is_nearly_right_is_suggested(argv, says, capsys):
    """A wrong key of the file gets that, too; each command suggests flags of its own."""
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_a_command_is_needed(capsys):
    """And the complaint is as short as the others."""
    with pytest.raises(SystemExit) as caught:
        main([])

    assert caught.value.code == 2
    assert capsys.readouterr().err == "pdrelay: the following arguments are required: COMMAND\n"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_names_the_commit_and_the_kind(flag, capsys):
    """It is what a report of a fault begins with."""
    with pytest.raises(SystemExit) as caught:
        main([flag])

    assert caught.value.code == 0
    assert re.fullmatch(r"pdrelay \S+ \(commit [\w-]+, (compiled|plain Python)\)\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("fastapi", ["serve", "--decode", "127.0.0.1:1"]),
        ("httptools", ["serve", "--decode", "127.0.0.1:1"]),
        ("httpx", ["instances", "list"]),
        ("httpx", ["why", "pdrelay-1"]),
    ],
)
def test_without_the_extra_of_the_router_a_sentence_says_which_it_is(package, argv):
    """`pip install .` brings msgspec alone, as the image of engines needs no more."""
    done = run_with(f"sys.modules[{package!r}] = None", *argv)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pdrelay: {package} is not installed, which comes with the extra for the router: "
        "pip install 'pdrelay[proxy]' or, in a checkout, pip install '.[proxy]'\n"
    )


@pytest.mark.parametrize(
    ("before", "missing"),
    [
        ("import importlib.metadata; importlib.metadata.entry_points = lambda **_: ()", "this command"),
        ("sys.modules['pdrelay_tools'] = None", "pdrelay_tools"),
        ("sys.modules['httpx'] = None", "httpx"),
    ],
    ids=["without the tools", "with half of them", "without a library"],
)
@pytest.mark.parametrize("argv", [["up", "--engine", "sim"], ["check", "--help"]], ids=" ".join)
def test_a_tool_that_is_not_installed_says_how_to_get_it(before, missing, argv):
    """Whatever is behind its name; `pip install 'pdrelay[proxy]'` brings the router alone."""
    done = run_with(before, *argv)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pdrelay {argv[0]}: {missing} is not installed: "
        "pip install 'pdrelay[tools]' or, in a checkout, pip install . ./tools\n"
    )


def test_a_router_needs_no_tools():
    """Neither those that are installed, nor a look at what is: each start would take longer."""
    nothing = "import importlib.metadata; importlib.metadata.entry_points = sys.modules['pdrelay_tools'] = None"
    done = run_with(nothing, "serve", "--help")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["fastapi", "pdrelay_proxy.options", "pdrelay_proxy.requests.request"])
def test_ctrl_c_while_modules_are_loaded_is_silent(module):
    """Half a second on a fast machine, in which people notice that a flag is wrong."""
    press = f"""
class CtrlC:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
"""

    done = run_with(press, "serve", "--decode", "127.0.0.1:1", "--port", "0")

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("unbuffered", ["1", ""], ids=["at each line", "at the end"])
def test_a_reader_that_has_enough_gets_no_traceback(unbuffered):
    """`pdrelay prove --list | head -1`: the exit code is what shells have for that."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pdrelay_proxy.cli", "prove", "--list"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=env)
    os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")


def test_a_command_may_have_no_output():
    """`pdrelay up >&-`, as a supervisor starts it."""
    command = ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-m", "pdrelay_proxy.cli", "prove", "--list"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")


def run_with(before, *argv):
    """Run the command in a process in which something is done first."""
    code = f"import os, signal, sys\n{before}\nfrom pdrelay_proxy.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_serve_starts_the_server(monkeypatch):
    """With the router and the settings, and a way to read these again."""
    calls = []
    monkeypatch.setattr(server, "run", lambda *args, **options: calls.append((args, options)) or 7)
    monkeypatch.setattr(sys, "argv", ["pdrelay", "serve", "--prefill", "a:1", "--port", "9000"])

    assert main() == 7
    (((router, settings), options),) = calls
    assert router.app.title
    assert (settings.prefill, settings.port) == (("a:1",), 9000)
    assert options["again"]() == settings


@pytest.mark.parametrize(
    "settings",
    [
        Settings(prefill=("p0:1",)),
        Settings(decode=("d0:1",)),
        Settings(admin_key="sesame"),
        Settings(admin_key_file="key"),
        Settings().with_features(StoreSettings("file:/tmp/engines")),
        Settings().with_features(PodSettings("app=pdrelay")),
        Settings().with_features(PodSettings(kubernetes_inference_pool="pool")),
    ],
)
def test_a_router_that_engines_can_come_to_may_start_without(settings, caplog):
    """Later ones are added by hand, by another router, or are pods."""
    check_engines(settings, None)
    check_engines(settings, "pdrelay.toml")
    warn_without_engines(settings, "pdrelay.toml")

    assert caplog.records == []


def test_a_router_that_no_engine_can_come_to_does_not_start():
    """It would answer 503 for ever, and look well."""
    with pytest.raises(ConfigError, match="there are no engines, and none can be added: write --prefill and --decode"):
        check_engines(Settings(), None)


def test_a_router_that_only_its_file_can_give_engines_says_so(caplog):
    """The file may be written later: SIGHUP reads it."""
    check_engines(Settings(), "pdrelay.toml")
    warn_without_engines(Settings(), "pdrelay.toml")

    assert [one.message for one in caplog.records] == [
        "there are no engines, and requests get 503: write prefill and decode into pdrelay.toml and send SIGHUP"
    ]


def test_help_begins_with_what_most_routers_need(capsys):
    """Eleven flags; the rest by concern, each with its default and unit."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    parts = re.split(r"(?m)^(\S.*):$", shown)
    first = re.findall(r"(?m)^  (--[\w-]+)", parts[4])

    assert parts[3] == "what most routers need"
    assert len(first) == 11
    assert {"--prefill", "--decode", "--config"} < {*first}
    assert parts[5::2] == [
        "engines, and how a request is split between them", "health of engines", "retries",
        "admission and limits", "timeouts", "security", "admin port", "logs, metrics and traces", "workers",
        "Kubernetes", "roles of engines",
    ]  # fmt: skip
    assert "(default: 16 MiB)" in shown
    assert "(default: 5 s)" in shown
    assert "ADMIN_API_KEY" in shown


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pdrelay se", {"serve"}),
        ("pdrelay serve --circuit-breaker-f", {"--circuit-breaker-failures"}),
        ("pdrelay serve --decode-policy p", {"power_of_two", "prefix"}),
        ("pdrelay plan --prompt-len", {"--prompt-lengths"}),
    ],
)
def test_a_shell_completes_what_has_been_begun(line, offered, tmp_path):
    """With the protocol of argcomplete, whose hook runs the command once more."""
    pytest.importorskip("argcomplete")
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out")}
    shell = os.environ | place | {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "pdrelay_proxy.cli"], env=shell, check=True, timeout=60)

    assert {word.strip() for word in (tmp_path / "out").read_text().splitlines()} == offered
