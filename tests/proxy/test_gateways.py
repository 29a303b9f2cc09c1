"""What docs/cells.md gives the gateways above cells is configuration that they take."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.certificates import Authority

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cells.md"
HAPROXY = """
global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend clients
    bind 127.0.0.1:8080
    default_backend cells
"""
NGINX = """
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{block}
}}
"""


def block(first):
    """Return the block of the page that begins with this word."""
    (found,) = re.findall(rf"^```\n({first} .*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


def program(name):
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def taken(argv):
    """Return what a program says of a configuration that it does not take; nothing if it does."""
    done = subprocess.run(
        argv, env=os.environ | {"HEALTH_KEY": "k"}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


def test_haproxy_takes_the_block(tmp_path):
    """With addresses in place of names that only a site's DNS has, and an authority that is there."""
    haproxy = program("haproxy")
    authority = Authority(tmp_path, "ca")
    text = block("backend").replace("/etc/ssl/ca.pem", str(authority.own.cert))
    text = re.sub(r"(server \w+) [\w.]+:443", r"\1 127.0.0.1:443", text)
    (tmp_path / "cfg").write_text(HAPROXY + text)
    (tmp_path / "wrong").write_text(HAPROXY + text.replace("hash-type consistent", "hash-type fair"))

    assert taken([haproxy, "-c", "-f", str(tmp_path / "cfg")]) == ""
    assert "hash-type" in taken([haproxy, "-c", "-f", str(tmp_path / "wrong")])


def test_nginx_takes_the_block(tmp_path):
    """With a resolver that is an address: nginx asks for the name of one when it starts."""
    nginx = program("nginx")
    text = block("split_clients")
    resolved = re.sub(r"resolver [\w.-]+;", "resolver 127.0.0.1;", text)
    for name, one in (("cfg", resolved), ("wrong", resolved.replace("*   a-", "    a-"))):
        (tmp_path / name).write_text(NGINX.format(folder=tmp_path, block=one))

    assert resolved != text
    assert taken([nginx, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "cfg")]) == ""
    assert taken([nginx, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "wrong")]) != ""
