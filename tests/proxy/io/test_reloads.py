"""Certificates and keys that are renewed in their files are used without a signal or a restart."""

import contextlib
import shutil
import ssl

import pytest

from support.certificates import Authority
from xpyd_proxy.core.admission.admin_key import AdminKey
from xpyd_proxy.core.admission.keys import Keyring, Outbound
from xpyd_proxy.core.counters import Counters
from xpyd_proxy.core.model import Role
from xpyd_proxy.errors import Unauthorized
from xpyd_proxy.io.files import client_keys, engine_keys, engine_tls, operator_key, server_tls
from xpyd_proxy.io.reloads import FileReloads
from xpyd_proxy.settings import Settings


class Router:
    """What a router has read from its files."""

    def __init__(self, settings):
        self.settings = settings
        self.server, self.engines = server_tls(settings), engine_tls(settings)
        self.keyring, self.outbound = Keyring(client_keys(settings)), Outbound(engine_keys(settings))
        self.admin_key = AdminKey(operator_key(settings))
        self.counters = Counters(frozenset())
        self.reloads = FileReloads(
            lambda: self.settings,
            self.server,
            self.engines,
            self.keyring,
            self.outbound,
            self.admin_key,
            self.counters,
        )


def shown_by(serving, authority):
    """Shake hands with a server in memory, and return the serial number of its certificate."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(authority.own.cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.getpeercert()["serialNumber"]


@pytest.fixture
def authority(tmp_path):
    (tmp_path / "ca").mkdir()
    return Authority(tmp_path / "ca", "authority")


def mounted(folder, version, pair):
    """Write a secret as the kubelet does: files in a folder of their own, and ``..data`` is swapped to it."""
    (folder / version).mkdir(parents=True)
    shutil.copy(pair.cert, folder / version / "tls.crt")
    shutil.copy(pair.key, folder / version / "tls.key")
    (folder / "..new").symlink_to(version)
    (folder / "..new").rename(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_mounted_secret_that_is_swapped_is_served(tmp_path, authority, caplog):
    """cert-manager renews it every two months, and nobody sends a signal."""
    caplog.set_level("INFO")
    folder = tmp_path / "tls"
    mounted(folder, "..v1", authority.sign("first"))
    router = Router(Settings(tls_cert=str(folder / "tls.crt"), tls_key=str(folder / "tls.key")))
    before = shown_by(router.server, authority)
    await router.reloads.look()
    assert shown_by(router.server, authority) == before

    mounted(folder, "..v2", authority.sign("second"))
    await router.reloads.look()
    await router.reloads.look()

    assert shown_by(router.server, authority) != before
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 0}
    assert [record.message for record in caplog.records] == ["tls_cert, tls_key changed and was read again"]


async def test_a_certificate_that_does_not_fit_its_key_changes_nothing(tmp_path, authority, caplog):
    """Somebody writes the two files one after the other; once both are there, they are used."""
    first, second = authority.sign("first"), authority.sign("second")
    cert, key = tmp_path / "cert", tmp_path / "key"
    shutil.copy(first.cert, cert)
    shutil.copy(first.key, key)
    router = Router(Settings(tls_cert=str(cert), tls_key=str(key)))
    before = shown_by(router.server, authority)
    shutil.copy(second.cert, cert)
    await router.reloads.look()
    await router.reloads.look()
    assert shown_by(router.server, authority) == before
    assert [record.message.partition(",")[0] for record in caplog.records] == ["tls_cert changed and cannot be used"]

    shutil.copy(second.key, key)
    await router.reloads.look()
    assert shown_by(router.server, authority) != before
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 1}


async def test_keys_are_good_and_shown_as_they_stand_in_their_files(tmp_path):
    """A client whose key was taken out is refused within seconds; a file that is gone takes nobody's key away."""
    keys, engine = tmp_path / "keys", tmp_path / "engine"
    keys.write_text("a:sk-a\nb:sk-b\n")
    engine.write_text("old")
    router = Router(Settings(api_keys_file=str(keys), decode_api_key_file=str(engine)))
    keys.write_text("a:sk-a\n")
    engine.write_text("newer")
    await router.reloads.look()

    assert router.keyring.caller(((b"authorization", b"Bearer sk-a"),)) == "a"
    with pytest.raises(Unauthorized):
        router.keyring.caller(((b"authorization", b"Bearer sk-b"),))
    assert router.outbound.headers(Role.DECODE, ()) == ((b"authorization", b"Bearer newer"),)
    keys.unlink()
    await router.reloads.look()
    assert router.keyring.caller(((b"authorization", b"Bearer sk-a"),)) == "a"
    assert router.counters.file_reloads["failed",] == 1


async def test_the_key_of_operators_is_what_stands_in_its_file(tmp_path, caplog):
    """One that was rotated opens nothing any more; a file that is no key takes nobody's away. The log shows none."""
    caplog.set_level("INFO")
    path = tmp_path / "admin"
    path.write_text("sesame-1")
    router = Router(Settings(admin_key_file=str(path)))
    path.write_text("sesame-2, longer")
    await router.reloads.look()
    assert [router.admin_key.matches(key) for key in (b"sesame-1", b"sesame-2, longer")] == [True, False]

    path.write_text("sesame-33\n")
    await router.reloads.look()

    assert [router.admin_key.matches(key) for key in (b"sesame-1", b"sesame-33")] == [False, True]
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 1}
    assert "sesame" not in caplog.text + repr(router.admin_key)


async def test_a_setting_that_names_another_file_is_not_a_change_of_that_file(tmp_path):
    """SIGHUP has read it."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a:sk-{name}\n")
    router = Router(Settings(api_keys_file=str(tmp_path / "one")))
    router.settings = Settings(api_keys_file=str(tmp_path / "two"))
    await router.reloads.look()

    assert router.counters.file_reloads == {("ok",): 0, ("failed",): 0}


async def test_the_certificate_shown_to_engines_is_renewed(tmp_path, authority):
    """Engines would refuse the old one when it runs out."""
    first, second = authority.sign("first"), authority.sign("second")
    cert, key = tmp_path / "cert", tmp_path / "key"
    for pair in (first, second):
        shutil.copy(pair.cert, cert)
        shutil.copy(pair.key, key)
        if pair is first:
            router = Router(Settings(engine_ca=authority.own.cert, engine_cert=str(cert), engine_key=str(key)))
    await router.reloads.look()

    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 0}
