"""The parts of a response's head: status lines, and valid names and values of headers (RFC 9110, 5
and 15).
"""

import re
from http import HTTPStatus
from typing import Final


def _status_line(status: int) -> bytes:
    known = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {known}\r\n".encode("ascii")


STATUS_LINES: Final[dict[int, bytes]] = {number: _status_line(number) for number in range(100, 600)}
# A router has it in its answers to probes, and no engine has.
VERSION_HEADER: Final = "x-pdrelay-version"
HEADER_NAME: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
CONTROLS: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # which no value may have
