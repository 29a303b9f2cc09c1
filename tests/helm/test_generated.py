"""What helm/generate.py makes is as it would make it now."""

import dataclasses
import hashlib
import importlib.util
import json
import re
import tarfile

import pytest
import yaml

from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.settings import PolicyName
from support import chart_archive
from support.helm_chart import CHART, ROOT, Chart, binary, notes, run
from support.oci_registry import oci_registry

pytestmark = pytest.mark.processes


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


def test_the_chart_knows_the_policies_of_the_router():
    """It refuses another name, because the router would not start."""
    listed = re.search(r"own := list (.*) -", (CHART / "templates/_checks.tpl").read_text())[1]

    assert listed.replace('"', "").split() == [*PolicyName, *feature_policies()]


def _leaves(values, path, described):
    for key, value in values.items():
        name = f"{path}{key}"
        role = name.replace("decode.", "prefill.", 1)
        if isinstance(value, dict) and value and name not in described and role not in described:
            yield from _leaves(value, f"{name}.", described)
        else:
            yield name


def test_a_setting_is_described_by_its_default(generate):
    """The connector refuses a path that is true, and a switch that is a word; the chart does so before."""
    kinds = {"path": "", "switch": False, "maybe": None, "names": ("UCX",)}
    made = dataclasses.make_dataclass("Settings", [(n, object, dataclasses.field(default=d)) for n, d in kinds.items()])
    found = {field.name: generate._connector(field)["type"] for field in dataclasses.fields(made)}

    assert found == {
        "path": "string", "switch": "boolean", "maybe": ["boolean", "null"], "names": ["array", "object"],
    }  # fmt: skip


def test_notes_tell_how_to_go_on():
    """And what is open: no keys, no secret."""
    usual, quiet = notes(), notes("-f", str(CHART / "ci" / "2p4d-values.yaml"))

    assert "kubectl -n ns rollout status deployment/r-pdrelay-router" in usual
    assert "router.apiKeys.secretName is empty" in usual
    assert "The engines' secret is r-pdrelay-connector, made by this chart." in usual
    assert "data plane is not closed" not in usual + quiet
    assert "is empty" not in quiet
    assert "https://localhost:8000" in quiet
    assert "whatever is in front must speak it" in quiet
    assert "whatever is in front" not in usual


def test_notes_say_so_if_the_test_cannot_get_in():
    """Routers that want a certificate of their clients want one of it, too."""
    tls = ["--set", "router.tls.secretName=t,router.tls.clientCaSecretName=c"]
    shown = [*tls, "--set", "tests.clientCertSecretName=p"]
    texts = [notes(*more) for more in (tls, shown)]

    assert ["helm test will fail" in text for text in texts] == [True, False]


def test_notes_say_so_if_a_pod_takes_longer_than_the_cluster_autoscaler_gives_it():
    """Its --max-graceful-termination-sec is 600 by default; the chart's own times fit."""
    longer = ["--set", "decode.drain.requestSeconds=900"]
    texts = [notes(*more) for more in ([], longer)]

    assert ["The cluster autoscaler kills them after 600 s" in text for text in texts] == [False, True]
    assert "decode pods may take 930 s to end" in texts[1]


def test_the_chart_is_packed_without_its_tests(tmp_path):
    """ci/ is for us; a package holds what is installed, and it renders as the folder does."""
    for helm in ("helm3", "helm4"):
        run(helm, "package", str(CHART), "-d", str(tmp_path))
        (package,) = tmp_path.glob("*.tgz")

        assert Chart(package).objects() == Chart().objects()
        package.unlink()


def test_an_archive_of_the_package_holds_what_helm_pushes(tmp_path, monkeypatch):
    """What is copied from it into a registry is the chart, and it is the same archive each time."""
    monkeypatch.setenv("HELM_CACHE_HOME", str(tmp_path / "cache"))
    run("helm4", "package", str(CHART), "-d", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    archives = [tmp_path / "first.tar", tmp_path / "second.tar"]
    for archive in archives:
        chart_archive.main(binary("helm4"), str(package), str(archive))
    assert archives[0].read_bytes() == archives[1].read_bytes()

    with tarfile.open(archives[0]) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    (named,) = json.loads(files["index.json"])["manifests"]
    blobs = {name.removeprefix("blobs/").replace("/", ":"): body for name, body in files.items() if "blobs" in name}
    assert all(name == f"sha256:{hashlib.sha256(body).hexdigest()}" for name, body in blobs.items())
    with oci_registry() as (host, registry):
        tag = named["annotations"]["org.opencontainers.image.ref.name"]
        manifest = named["mediaType"], blobs[named["digest"]]
        registry.manifests = dict.fromkeys([("chart", tag), ("chart", named["digest"])], manifest)
        registry.blobs = blobs
        (tmp_path / "out").mkdir()
        run("helm4", "pull", f"oci://{host}/chart", "--plain-http", "--version", "0.1.0", "-d", str(tmp_path / "out"))

    assert [file.read_bytes() for file in (tmp_path / "out").iterdir()] == [package.read_bytes()]
