"""Files of the operator: keys and certificates."""

import ssl
from dataclasses import replace

import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import client_keys, engine_keys, engine_tls, join_key, operator_key, server_tls
from pdrelay_proxy.settings import Settings
from support.certificates import Authority

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


def test_without_files_nothing_is_wanted_and_nothing_is_shown():
    """The way it is on a desk."""
    assert client_keys(Settings()) is None
    assert engine_keys(Settings()) == {}
    assert server_tls(Settings()) is None
    assert engine_tls(Settings()).verify_mode is ssl.CERT_REQUIRED


def test_the_key_of_a_pool_is_in_a_file_or_in_the_environment(tmp_path):
    """The file wins: it can be replaced while the router serves."""
    path = tmp_path / "key"
    path.write_text("from-file\n")
    settings = Settings(prefill_api_key="env", decode_api_key="env", decode_api_key_file=str(path))

    assert engine_keys(settings) == {Role.PREFILL: "env", Role.DECODE: "from-file"}


def test_the_key_of_operators_is_in_a_file_or_in_the_environment(tmp_path):
    """A service manager hands secrets over as files; the environment of a process is seen by more."""
    path = tmp_path / "key"
    path.write_text("from-file\n")

    assert operator_key(Settings()) is None
    assert operator_key(Settings(admin_key="env")) == "env"
    assert operator_key(Settings(admin_key="env", admin_key_file=str(path))) == "from-file"


def test_the_join_key_is_not_the_admin_key(tmp_path):
    """An engine's host would be an operator; also while one of them has two lines."""
    admin, join = tmp_path / "admin", tmp_path / "join"
    admin.write_text("sesame-1\nsesame-2\n")
    join.write_text("join-me\n")

    assert join_key(Settings()) is None
    assert join_key(Settings(join_key_file=str(join), admin_key_file=str(admin))) == "join-me"
    join.write_text("join-me\nsesame-2\n")
    for settings in (Settings(admin_key_file=str(admin)), Settings(admin_key="sesame-2")):
        with pytest.raises(ConfigError, match="has the admin key"):
            join_key(replace(settings, join_key_file=str(join)))


@pytest.mark.parametrize(
    "name", ["api_keys_file", "admin_key_file", "join_key_file", "prefill_api_key_file", "engine_ca", "tls_client_ca"]
)
def test_a_file_that_is_not_there_stops_the_router(name, authority):
    """Its name is in the sentence."""
    pair = authority.sign("a")
    settings = Settings(tls_cert=pair.cert, tls_key=pair.key, **{name: "/nowhere/file"})

    with pytest.raises(ConfigError, match=r"^/nowhere/file cannot be read: No such file or directory$"):
        [read(settings) for read in (client_keys, operator_key, join_key, engine_keys, engine_tls, server_tls)]


@pytest.mark.parametrize(
    ("given", "read", "says"),
    [
        ({"tls_cert"}, server_tls, "tls_cert and tls_key belong together, and tls_client_ca needs both"),
        ({"tls_client_ca"}, server_tls, "tls_cert and tls_key belong together"),
        ({"engine_key"}, engine_tls, "engine_cert and engine_key belong together"),
    ],
)
def test_halves_of_a_pair_are_a_mistake(given, read, says, authority):
    """Half a setting would leave a door open."""
    with pytest.raises(ConfigError, match=says):
        read(Settings(**dict.fromkeys(given, authority.own.cert)))


def test_a_key_of_another_certificate_is_told(authority, tmp_path):
    """And so is a file that is no certificate at all, without a look into it."""
    one, two = authority.sign("one"), authority.sign("two")
    text = tmp_path / "text"
    text.write_text("secret")

    with pytest.raises(ConfigError, match="are not a certificate and its private key in PEM"):
        server_tls(Settings(tls_cert=one.cert, tls_key=two.key))
    with pytest.raises(ConfigError, match="has no certificates of authorities in PEM"):
        engine_tls(Settings(engine_ca=str(text)))
