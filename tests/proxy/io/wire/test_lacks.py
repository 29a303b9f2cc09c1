"""What the router itself lacks for a connection is made room for, waited for, and never held against an engine."""

import asyncio
import errno
import os

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import RouterLacks
from pdrelay_proxy.io.wire.pool import Pool

pytestmark = pytest.mark.edges


LACKS = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL]


def engine(name, port):
    return Instance(InstanceId(name), Role.DECODE, Address("http", "127.0.0.1", port))


async def served(pool, instance, count):
    """Open connections side by side, and put all of them back."""
    for connection in [await pool.open(instance) for _ in range(count)]:
        pool.put_back(connection)


@pytest.fixture
async def port():
    """One where connections are accepted, and nothing is said."""

    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize("lack", LACKS)
async def test_idle_connections_make_room(port, lack):
    """Those that have waited the longest go first, whichever engine they lead to."""
    left = [5]

    async def dial(protocol, host, port):
        if len(pool._open) >= left[0]:
            raise OSError(lack, os.strerror(lack))
        await asyncio.get_running_loop().create_connection(protocol, host, port)

    pool = Pool(keepalive_s=60, connect_timeout_s=20, dial=dial)
    try:
        await served(pool, engine("p0", port), 5)
        assert pool.idle == 5
        connection = await pool.open(engine("d0", port))
        assert not connection.idle or pool.idle == 0
    finally:
        await pool.close()


@pytest.mark.parametrize("lack", LACKS)
async def test_without_idle_connections_it_tries_again_within_its_time(port, lack):
    """Another request may end meanwhile; if none does, the fault is the router's."""
    fails = [3]

    async def dial(protocol, host, port):
        if fails[0]:
            fails[0] -= 1
            raise OSError(lack, os.strerror(lack))
        await asyncio.get_running_loop().create_connection(protocol, host, port)

    pool = Pool(keepalive_s=60, connect_timeout_s=0.5, dial=dial)
    try:
        await pool.open(engine("d0", port))
        fails[0] = 1_000_000
        with pytest.raises(RouterLacks, match="too few"):
            await pool.open(engine("d0", port))
    finally:
        await pool.close()
