"""What a connection gets whose request is refused after the application has begun with it."""

import socket

from support.router_process import router_processes

ODD = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\t\r\n\r\n0\r\n\r\n"


def test_a_request_that_the_parser_refuses_behind_its_head_has_one_answer(tmp_path):
    """llhttp says so when uvicorn has the head already: the application answered a connection that was half closed."""
    with router_processes(tmp_path, 1, "--health-check-interval", "0") as (router,):
        port = int(router.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(ODD)
            got = b""
            while piece := client.recv(65536):
                got += piece
        router.terminate()
        router.child.wait()

    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in router.said
