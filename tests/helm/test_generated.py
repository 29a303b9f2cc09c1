"""What helm/generate.py makes is as it would make it now."""

import importlib.util
import shutil
import subprocess

import pytest
import yaml

from support.helm_chart import CHART, HELMS, ROOT, Chart, Refused, run


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("helm_generate", ROOT / "helm" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_and_the_schema_say_what_values_and_options_say(generate):
    """Otherwise: python helm/generate.py."""
    old = [path.name for path, text in generate.made().items() if path.read_text() != text]

    assert old == [], "run: python helm/generate.py"


def test_every_value_is_described(generate):
    """One of decode's may have prefill's description; nothing else may have none."""
    text = (CHART / "values.yaml").read_text()
    described = {key for key, _, _ in generate._rows(text)}
    missing = [
        leaf
        for leaf in _leaves(yaml.safe_load(text), "", described)
        if leaf not in described and leaf.replace("decode.", "prefill.", 1) not in described
    ]

    assert missing == []


def _leaves(values, path, described):
    for key, value in values.items():
        name = f"{path}{key}"
        role = name.replace("decode.", "prefill.", 1)
        if isinstance(value, dict) and value and name not in described and role not in described:
            yield from _leaves(value, f"{name}.", described)
        else:
            yield name


def test_a_value_that_changed_would_be_noticed(generate):
    """The check of the check."""
    text = (CHART / "values.yaml").read_text()
    page = (CHART / "README.md").read_text()

    assert generate.readme(page, text) == page
    assert generate.readme(page, text.replace("leaseSeconds: 30", "leaseSeconds: 31")) != page


def test_notes_tell_how_to_go_on():
    """And what is open: no keys, no secret."""
    notes = run("helm4", "install", "r", str(CHART), "--dry-run=client", "-n", "ns").partition("NOTES:")[2]
    safe = ["-f", str(CHART / "ci" / "2p4d-values.yaml")]
    quiet = run("helm4", "install", "r", str(CHART), "--dry-run=client", "-n", "ns", *safe).partition("NOTES:")[2]

    assert "kubectl -n ns rollout status deployment/r-xpyd-router" in notes
    assert "router.apiKeys.secretName is empty" in notes
    assert "connector.secret.name is empty" in notes
    assert "is empty" not in quiet
    assert "https://localhost:8000" in quiet


def test_the_chart_is_packed_without_its_tests(tmp_path):
    """ci/ is for us; a package holds what is installed, and it renders as the folder does."""
    for helm in ("helm3", "helm4"):
        run(helm, "package", str(CHART), "-d", str(tmp_path))
        (package,) = tmp_path.glob("*.tgz")

        assert Chart(package).objects() == Chart().objects()
        package.unlink()


@pytest.mark.parametrize("helm", HELMS)
def test_a_package_can_be_signed_and_a_changed_one_is_not_taken_for_it(helm, tmp_path):
    """With a key of this test alone."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)

    def gpg(*argv):
        whole = ["gpg", "--homedir", str(home), "--batch", "--pinentry-mode", "loopback", "--passphrase", "", *argv]
        return subprocess.run(whole, capture_output=True, check=True, timeout=60).stdout

    gpg("--quick-generate-key", "xpyd test", "rsa2048", "sign", "1d")
    (secret := tmp_path / "secret.gpg").write_bytes(gpg("--export-secret-keys"))
    (public := tmp_path / "public.gpg").write_bytes(gpg("--export"))
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True, capture_output=True, timeout=60)
    run(helm, "package", str(CHART), "-d", str(tmp_path), "--sign", "--key", "xpyd test", "--keyring", str(secret))
    (package,) = tmp_path.glob("*.tgz")

    assert "xpyd test" in run(helm, "verify", str(package), "--keyring", str(public))
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(Refused, match="sha256 sum does not match"):
        run(helm, "verify", str(package), "--keyring", str(public))
