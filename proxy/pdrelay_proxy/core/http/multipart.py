"""Forms (multipart/form-data, RFC 7578): checks the heads of their parts, and reads one value, in
one pass within bounds.

It accepts a subset that every parser reads alike, so that no field is seen by the engine and not
here: nothing before the first boundary or behind the last one, no boundary within a part, CRLF
between lines, one plain name for each part. vLLM 0.32 reads forms with python-multipart, through
starlette.
"""

import re
from typing import Final

from pdrelay_proxy.errors import BadRequest, UnsupportedMedia

PARTS_MOST: Final = 256  # of a form; vLLM's have some twenty fields
HEAD_MOST: Final = 4096  # bytes of one part's head, as in python-multipart
_TYPE: Final = b"multipart/form-data"
# RFC 2046, 5.1.1, without the space.
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,70}")
_TOKEN: Final = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]++"
_PLAIN_BOUNDARY: Final = re.compile(_TOKEN)
_PARAMETER: Final = re.compile(
    rb";[ \t]*+(?:(%b)[ \t]*+=[ \t]*+(?:(%b)|\"([^\"\\]*+)\")[ \t]*+)?" % (_TOKEN, _TOKEN)
)
_HEADER: Final = re.compile(rb"(%b):([^\r\n\x00]*+)\r\n" % _TOKEN)
# A backslash in a value is a plain character here. Before a quote, parsers differ on it, so it is
# refused.
_DISPOSITION: Final = re.compile(rb"[ \t]*+form-data[ \t]*+((?:;.*)?)", re.IGNORECASE)
_FIELD: Final = re.compile(
    rb";[ \t]*+(%b)[ \t]*+=[ \t]*+(?:\"([^\"]*+)\"|([^\" \t;]++))[ \t]*+" % _TOKEN
)
_MODEL: Final = b"model"
_PRIVATE: Final = (b"kv_transfer_params", b"ec_transfer_params", b"vllm_xargs")


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a Content-Type of ``multipart/form-data`` declares.

    starlette decodes the names of fields by the charset: another one than UTF-8 could yield other
    names there.

    Raises:
        UnsupportedMedia: it has a parameter other than one boundary and ``charset=utf-8``, or no
            boundary.
    """
    parameters: dict[bytes, bytes] = {}
    offset = len(content_type.partition(b";")[0])
    while offset < len(content_type):
        parameter = _PARAMETER.match(content_type, offset)
        if parameter is None:
            raise UnsupportedMedia(
                "the parameters of multipart/form-data cannot be read: write boundary=NAME alone"
            )
        offset = parameter.end()
        name = (parameter[1] or b"").lower()
        value = parameter[3] if parameter[2] is None else parameter[2]
        if not name:
            continue
        if name in parameters:
            raise UnsupportedMedia(
                f"multipart/form-data has the parameter {name.decode()} twice: write it once"
            )
        if name != b"boundary" and (name != b"charset" or value.lower() != b"utf-8"):
            raise UnsupportedMedia(
                f"multipart/form-data has the parameter {name.decode()}={value.decode('latin-1')}: "
                "only boundary and charset=utf-8 are taken"
            )
        parameters[name] = value
    boundary = parameters.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise UnsupportedMedia(
            "multipart/form-data needs a boundary of 1 to 70 characters (RFC 2046, 5.1.1)"
        )
    return boundary


def content_type(boundary: bytes) -> bytes:
    """Return the Content-Type of a form for an engine, whatever form the client's had."""
    value = boundary if _PLAIN_BOUNDARY.fullmatch(boundary) else b'"%b"' % boundary
    return b"%b; boundary=%b" % (_TYPE, value)


def check_form(boundary: bytes, body: bytes) -> str | None:
    """Accept a form; return the value of its part ``model``; None: it has none. Of several the last
    counts, as in vLLM.

    Other values are not read. The time grows with the size of the body.

    Raises:
        BadRequest: parsers could read it differently, it has too many parts or a head that is too
            long, or it has a field that only the router may set.
    """
    delimiter = b"--" + boundary
    model = None
    offset = (
        2 if body.startswith(b"\r\n") else 0
    )  # some clients begin so, and other parsers skip it
    if not body.startswith(delimiter, offset):
        raise BadRequest("the form does not begin with its boundary")
    for _ in range(PARTS_MOST):
        offset += len(delimiter)
        if body.startswith(b"--", offset):
            if body[offset + 2 : offset + 5] not in (b"", b"\r\n"):
                raise BadRequest("the form goes on behind its last boundary")
            return None if model is None else _text(model)
        if not body.startswith(b"\r\n", offset):
            raise BadRequest("the form has its boundary within a part: choose another one")
        start, name = _check_head(body, offset + 2)
        offset = body.find(delimiter, start)
        if offset < 0:
            raise BadRequest("the form does not end with its boundary")
        if not body.startswith(b"\r\n", offset - 2) or offset - 2 < start:
            raise BadRequest("the form has its boundary within a part: choose another one")
        if name == _MODEL:
            model = body[start : offset - 2]
    raise BadRequest(f"the form has more than {PARTS_MOST} parts, the most this router takes")


def _text(value: bytes) -> str | None:
    """Return a value as an engine reads it; None: it is empty, or not UTF-8."""
    try:
        return value.decode() or None
    except UnicodeDecodeError:
        return None


def _check_head(body: bytes, offset: int) -> tuple[int, bytes]:
    """Check the head of the part at ``offset``; return where its value begins, and its name."""
    end = offset + HEAD_MOST
    name = None
    while not body.startswith(b"\r\n", offset):
        header = _HEADER.match(body, offset, end)
        if header is None:
            if len(body) > end and body.find(b"\r\n\r\n", offset, end) < 0:
                raise BadRequest(f"a part of the form has a head of more than {HEAD_MOST} bytes")
            raise BadRequest(
                "a part of the form has a head that cannot be read: write lines of name: value"
            )
        if header[1].lower() == b"content-disposition":
            if name is not None:
                raise BadRequest("a part of the form has two Content-Disposition lines")
            name = _name_in(header[2])
        offset = header.end()
    if name is None:
        raise BadRequest('a part of the form has no Content-Disposition: form-data; name="..."')
    for private in _PRIVATE:
        if name.strip().lower().startswith(private):
            field_name = private.decode()
            raise BadRequest(
                f"{field_name} is set by the router and must not be part of a request",
                param=field_name,
            )
    return offset + 2, name


def _name_in(disposition: bytes) -> bytes:
    """Return the name of a field in a Content-Disposition."""
    disposition_match = _DISPOSITION.fullmatch(disposition)
    if disposition_match is None:
        raise BadRequest("a part of the form is not form-data")
    rest = disposition_match[1].rstrip(b" \t")
    offset = 0
    parameters: dict[bytes, bytes] = {}
    while offset < len(rest):
        field = _FIELD.match(rest, offset)
        if field is None:
            raise BadRequest(
                "a Content-Disposition of the form cannot be read: write a quote in a value as %22"
            )
        key = field[1].lower()
        value = field[3] if field[2] is None else field[2]
        if key.startswith(b"name*"):
            raise BadRequest("the names of a form's fields must be plain, not encoded (name*=)")
        if key not in (b"name", b"filename", b"filename*") or key in parameters:
            raise BadRequest(
                f"a Content-Disposition of the form has {key.decode()}: one name and one filename "
                f"may be"
            )
        if value.endswith(b"\\"):
            raise BadRequest(
                "a value in a Content-Disposition ends with a backslash: parsers differ on it"
            )
        parameters[key] = value
        offset = field.end()
    name = parameters.get(b"name")
    if name is None or b"\\" in name:
        raise BadRequest("a part of the form has no plain name")
    return name
