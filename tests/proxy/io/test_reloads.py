"""Certificates and keys that are renewed in their files are used without a signal or a restart."""

import asyncio
import contextlib
import itertools
import os
import shutil
import ssl
import time

import pytest

from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring, Outbound
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import Unauthorized
from pdrelay_proxy.io.files import client_keys, engine_keys, engine_tls, join_key, operator_key, server_tls
from pdrelay_proxy.io.reloads import FileReloads
from pdrelay_proxy.settings import Settings
from support.certificates import Authority

pytestmark = pytest.mark.processes


class Router:
    """What a router has read from its files."""

    def __init__(self, settings):
        self.settings = settings
        self.server, self.engines = server_tls(settings), engine_tls(settings)
        self.keyring, self.outbound = Keyring(client_keys(settings)), Outbound(engine_keys(settings))
        self.admin_key = AdminKey(operator_key(settings))
        self.join_key = AdminKey(join_key(settings))
        self.counters = Counters(frozenset())
        self.reloads = FileReloads(
            lambda: self.settings,
            self.server,
            self.engines,
            self.keyring,
            self.outbound,
            self.admin_key,
            self.counters,
            join_key=self.join_key,
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
    await router.reloads.check_files()
    assert shown_by(router.server, authority) == before

    mounted(folder, "..v2", authority.sign("second"))
    await router.reloads.check_files()
    await router.reloads.check_files()

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
    await router.reloads.check_files()
    await router.reloads.check_files()
    assert shown_by(router.server, authority) == before
    assert [record.message.partition(",")[0] for record in caplog.records] == ["tls_cert changed and cannot be used"]

    shutil.copy(second.key, key)
    await router.reloads.check_files()
    assert shown_by(router.server, authority) != before
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 1}


async def test_keys_are_good_and_shown_as_they_stand_in_their_files(tmp_path):
    """A client whose key was taken out is refused within seconds; a file that is gone takes nobody's key away."""
    keys, engine = tmp_path / "keys", tmp_path / "engine"
    keys.write_text("a:sk-a-of-16-chars\nb:sk-b-of-16-chars\n")
    engine.write_text("old\n")
    router = Router(Settings(api_keys_file=str(keys), decode_api_key_file=str(engine)))
    keys.write_text("a:sk-a-of-16-chars\n")
    engine.write_text("newer\n")
    await router.reloads.check_files()

    assert router.keyring.caller(((b"authorization", b"Bearer sk-a-of-16-chars"),)) == "a"
    with pytest.raises(Unauthorized):
        router.keyring.caller(((b"authorization", b"Bearer sk-b-of-16-chars"),))
    assert router.outbound.headers(Role.DECODE, ()) == ((b"authorization", b"Bearer newer"),)
    keys.unlink()
    await router.reloads.check_files()
    assert router.keyring.caller(((b"authorization", b"Bearer sk-a-of-16-chars"),)) == "a"
    assert router.counters.file_reloads["failed",] == 1


FULL = "alice:first-of-alice-0123456789\nbob:first-of-bob-0123456789\n"


TIMES = itertools.count(1)


def in_place(path, text):
    """Write a file as an editor does, at a time of its own: a file system's clock may stand still between two."""
    path.write_text(text)
    at = time.time_ns() + next(TIMES)
    os.utime(path, ns=(at, at))


async def test_a_key_that_is_half_written_opens_nothing(tmp_path, caplog):
    """A look may come while a file is written in place: the router waits until its last line ends."""
    path = tmp_path / "keys"
    path.write_text(FULL)
    router = Router(Settings(api_keys_file=str(path)))
    for text in ("", "alice:second-of-alice-01234", "alice:second-of-alice-0123456789\nbob:second-of-bob-0123"):
        in_place(path, text)
        await router.reloads.check_files()
        assert router.keyring.caller(((b"x-api-key", b"first-of-alice-0123456789"),)) == "alice"
    in_place(path, FULL.replace("first", "second"))
    await router.reloads.check_files()

    assert router.keyring.caller(((b"x-api-key", b"second-of-alice-0123456789"),)) == "alice"
    for half in (b"first-of-alice-0123456789", b"second-of-alice-01234", b"second-of-bob-0123"):
        with pytest.raises(Unauthorized):
            router.keyring.caller(((b"x-api-key", half),))
    assert caplog.text.count("api_keys_file changed, and its last line has no line break") == 3
    assert "of-" not in caplog.text


async def test_a_file_without_a_last_line_break_counts_once_it_rests(tmp_path):
    """Many tools write secrets without one. The keys of engines and of operators have the same rule."""
    names = {"api_keys_file": "a:first-0123456789ab", "admin_key_file": "first-a", "decode_api_key_file": "first-d"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    router = Router(Settings(**{name: str(tmp_path / name) for name in names}))

    def good():
        shown = router.outbound.headers(Role.DECODE, ())[0][1].decode().removeprefix("Bearer ")
        return router.keyring.keys.owner(b"second-0123456789ab"), router.admin_key.matches(b"second-a"), shown

    for name, text in names.items():
        in_place(tmp_path / name, text.replace("first", "second"))
    await router.reloads.check_files()
    assert good() == (None, False, "first-d")

    await router.reloads.check_files()
    assert good() == ("a", True, "second-d")
    assert router.counters.file_reloads["failed",] == 0


def test_a_file_without_a_last_line_break_is_warned_of_at_the_start(tmp_path, caplog):
    """It looks like one that is being written."""
    path = tmp_path / "keys"
    path.write_text("a:first-0123456789ab")

    assert client_keys(Settings(api_keys_file=str(path))).owner(b"first-0123456789ab") == "a"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the last line has no line break" in caplog.text


async def test_the_key_of_operators_is_what_stands_in_its_file(tmp_path, caplog):
    """One that was rotated opens nothing any more; a file that is no key takes nobody's away. The log shows none."""
    caplog.set_level("INFO")
    path = tmp_path / "admin"
    path.write_text("sesame-1")
    router = Router(Settings(admin_key_file=str(path)))
    path.write_text("sesame-2, longer\n")
    await router.reloads.check_files()
    assert [router.admin_key.matches(key) for key in (b"sesame-1", b"sesame-2, longer")] == [True, False]

    path.write_text("sesame-33\n")
    await router.reloads.check_files()

    assert [router.admin_key.matches(key) for key in (b"sesame-1", b"sesame-33")] == [False, True]
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 1}
    assert "sesame" not in caplog.text + repr(router.admin_key)


async def test_an_admin_key_is_replaced_without_a_gap(tmp_path):
    """Its holders change one after the other: two lines are two keys; three are none."""
    path = tmp_path / "admin"
    good = []
    path.write_text("old-1\n")
    router = Router(Settings(admin_key_file=str(path)))
    for text in ("old-1\nnew-12\n", "old-1\nnew-12\nodd-123\n", "new-12\n"):
        in_place(path, text)
        await router.reloads.check_files()
        good.append([router.admin_key.matches(key) for key in (b"old-1", b"new-12", b"odd-123", b"old-1\nnew-12", b"")])

    both, new = [True, True, False, False, False], [False, True, False, False, False]
    assert good == [both, both, new]


async def test_a_join_key_is_replaced_without_a_gap(tmp_path, caplog):
    """As an admin key is; what names the admin key changes nothing."""
    admin, join = tmp_path / "admin", tmp_path / "join"
    good = []
    admin.write_text("sesame-1\n")
    join.write_text("old-1\n")
    router = Router(Settings(admin_key_file=str(admin), join_key_file=str(join)))
    for text in ("old-1\nnew-12\n", "new-12\n", "sesame-1\nnew-12\n"):
        in_place(join, text)
        await router.reloads.check_files()
        good.append([router.join_key.matches(key) for key in (b"old-1", b"new-12", b"sesame-1")])

    assert good == [[True, True, False], [False, True, False], [False, True, False]]
    assert "has the admin key" in caplog.text
    assert router.admin_key.matches(b"sesame-1")


async def test_a_file_that_is_written_after_sighup_has_named_it_is_read_once_more(tmp_path):
    """A key that was taken out before the first look at the new file would be good for ever."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a:sk-{name}-of-16-chars\n")
    router = Router(Settings(api_keys_file=str(tmp_path / "one")))
    router.settings = Settings(api_keys_file=str(tmp_path / "two"))
    router.keyring.keys = client_keys(router.settings)
    in_place(tmp_path / "two", "a:sk-three-of-16-chars\n")
    await router.reloads.check_files()
    await router.reloads.check_files()

    owners = [router.keyring.keys.owner(f"sk-{name}-of-16-chars".encode()) for name in ("one", "two", "three")]
    assert owners == [None, None, "a"]
    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 0}


async def test_a_look_that_sighup_overtakes_brings_no_old_file_back(tmp_path):
    """A look takes its time where a file system is slow, and the settings name other files by then."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a:sk-{name}-of-16-chars\n")
    router = Router(Settings(api_keys_file=str(tmp_path / "one")))
    in_place(tmp_path / "one", "a:sk-three-of-16-chars\n")
    look = asyncio.create_task(router.reloads.check_files())
    await asyncio.sleep(0)
    router.settings = Settings(api_keys_file=str(tmp_path / "two"))
    router.keyring.keys = client_keys(router.settings)
    await look

    assert router.keyring.keys.owner(b"sk-two-of-16-chars") == "a"
    assert router.keyring.keys.owner(b"sk-three-of-16-chars") is None


async def test_the_certificate_shown_to_engines_is_renewed(tmp_path, authority):
    """Engines would refuse the old one when it runs out."""
    first, second = authority.sign("first"), authority.sign("second")
    cert, key = tmp_path / "cert", tmp_path / "key"
    for pair in (first, second):
        shutil.copy(pair.cert, cert)
        shutil.copy(pair.key, key)
        if pair is first:
            router = Router(Settings(engine_ca=authority.own.cert, engine_cert=str(cert), engine_key=str(key)))
    await router.reloads.check_files()

    assert router.counters.file_reloads == {("ok",): 1, ("failed",): 0}
