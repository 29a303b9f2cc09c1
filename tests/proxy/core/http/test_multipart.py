"""Forms: what is accepted is read alike by everybody, and reading it takes time in proportion to it."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from pdrelay_proxy.core.http.multipart import HEAD_MOST, PARTS_MOST, boundary_of, check_form, content_type
from pdrelay_proxy.errors import BadRequest, UnsupportedMedia

PRIVATE = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")


def form(*parts, boundary=b"x"):
    """Write a form of parts, each as its head without the last line break, and its value."""
    written = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in parts]
    return b"".join([*written, b"--%b--\r\n" % boundary])


def field(disposition, value=b"{}"):
    return form((b"Content-Disposition: form-data; " + disposition, value))


def test_usual_forms_are_accepted():
    """As httpx, requests, curl and browsers write them."""
    check_form(
        b"x",
        form(
            (b'Content-Disposition: form-data; name="model"', b"whisper"),
            (b'Content-Disposition: form-data; name="prompt"', b"kv_transfer_params\r\n--y"),
            (b'Content-Disposition: form-data; name="temperature"', b""),
            (b"Content-Length: 2\r\ncontent-disposition:form-data;name=language", b"en"),
            (
                b'Content-Disposition: form-data; name="file"; filename="C:\\a b; c=d.wav"\r\nContent-Type: audio/wav',
                bytes(range(256)),
            ),
        ),
    )
    check_form(b"x", field(b"name=file; filename=\"\xc3\xa4.wav\"; filename*=utf-8''%c3%a4.wav"))
    check_form(b"x", b"\r\n" + field(b"name=a"))
    check_form(b"x", field(b"name=a").removesuffix(b"\r\n"))
    check_form(b"x", b"--x--\r\n")


@pytest.mark.parametrize("name", [b'"kv_transfer_params"', b"ec_transfer_params", b'"vllm_xargs"', b'"VLLM_xargs[a]"'])
def test_a_form_with_a_private_field_is_refused(name):
    """In any case, and whatever white space a parser may drop."""
    for key in (b"name=", b"NAME=", b"name\t= ", b'filename="a"; name='):
        with pytest.raises(BadRequest, match="set by the router"):
            check_form(b"x", field(key + name))


@pytest.mark.parametrize("name", [b"name*=utf-8''kv%5Ftransfer_params", b'NAME*0="kv_"; name*1="transfer_params"'])
def test_a_form_whose_names_are_encoded_is_refused(name):
    """Some parsers decode them, and RFC 7578 forbids it."""
    with pytest.raises(BadRequest, match="plain"):
        check_form(b"x", field(name))


DISPOSITION = b'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "begin"),
        (b"{}", "begin"),
        (b"preamble\r\n--x\r\n", "begin"),
        (b"--x", "within"),
        (b"--xy\r\n" + DISPOSITION + b"\r\n\r\n1\r\n--xy--", "within"),
        (form((DISPOSITION, b"--x")), "within"),
        (form((DISPOSITION, b"1\n--x\n2")), "within"),
        (form((DISPOSITION, b"1\r\n--xx")), "within"),
        (b"--x\r\n" + DISPOSITION + b"\r\n\r\n--x--", "within"),
        (b"--x\r\n" + DISPOSITION + b"\r\n\r\n1", "end"),
        (form((DISPOSITION, b"1")) + b"epilogue", "behind"),
        (form((DISPOSITION, b"1")) + form((DISPOSITION, b"1")), "behind"),
        (form((b"Content-Type: text/plain", b"1")), "no Content-Disposition"),
        (form((DISPOSITION + b"\r\n" + DISPOSITION, b"1")), "two"),
        (form((DISPOSITION + b"\r\n folded: 1", b"1")), "cannot be read"),
        (form((DISPOSITION.replace(b"form-data;", b"form-data;\r\n"), b"1")), "cannot be read"),
        (form((b"no colon", b"1")), "cannot be read"),
        (form((DISPOSITION + b"\nX: y", b"1")), "cannot be read"),
        (form((b"Content-Disposition: attachment; name=a", b"1")), "not form-data"),
        (field(b'filename="a"'), "no plain name"),
        (field(b'name="a\\b"'), "no plain name"),
        (field(b'name="a"; name="b"'), "one name"),
        (field(b'name="a"; size=3'), "one name"),
        (field(b'name="a"; filename="b\\"; name=\\"c"'), "differ|cannot be read|one name"),
        (field(b'name="a'), "cannot be read"),
        (form((b"X: " + b"y" * HEAD_MOST, b"1")), "more than 4096 bytes"),
        (form(*[(DISPOSITION, b"1")] * (PARTS_MOST + 1)), "more than 256 parts"),
    ],
)
def test_what_parsers_may_read_in_two_ways_is_refused(body, why):
    """In one sentence."""
    with pytest.raises(BadRequest, match=why):
        check_form(b"x", body)


@pytest.mark.parametrize(
    ("declared", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b"Multipart/Form-Data;boundary=abc", b"abc"),
        (b'multipart/form-data; BOUNDARY = "a=b:c" ', b"a=b:c"),
        (b"multipart/form-data; charset=UTF-8; boundary=abc;", b"abc"),
    ],
)
def test_the_boundary_is_found(declared, boundary):
    """And written anew for the engine, with nothing else."""
    assert boundary_of(declared) == boundary
    assert boundary_of(content_type(boundary)) == boundary
    assert content_type(b"abc") == b"multipart/form-data; boundary=abc"


@pytest.mark.parametrize(
    "parameters",
    [
        b"",
        b"; boundary=",
        b"; boundary=a; boundary=a",
        b"; boundary=a; Boundary=b",
        b"; boundary=a; charset=utf-7",
        b"; charset=utf-16-be; boundary=a",
        b"; boundary=a; charset=unicode_escape",
        b"; boundary=a; charset=utf-8; charset=cp037",
        b"; boundary=a; x=y",
        b"; boundary*=utf-8''a",
        b"; boundary=a b",
        b'; boundary="a',
        b'; boundary="a\\"b"',
        b"; boundary=" + b"a" * 71,
        b"; boundary=a, multipart/form-data; boundary=b",
    ],
)
def test_other_parameters_are_refused(parameters):
    """starlette decodes names by the charset, and takes the last of several boundaries."""
    with pytest.raises(UnsupportedMedia, match="multipart/form-data"):
        boundary_of(b"multipart/form-data" + parameters)


PIECES = st.sampled_from(
    [
        *(b"--x", b"--x--", b"\r\n", b"\n", b"\r", b"-", b":", b"; ", b'"', b"\\", b"\x00", b" ", b"="),
        *(b"Content-Disposition: form-data", b"name=", b'name="', b"filename=", b'"a"', b"a", b"kv_transfer_params"),
        *(b"\r\n\r\n", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n', b"name*="),
    ]
)


async def fields_of(body):
    async def stream():
        yield body

    parser = MultiPartParser(Headers({"content-type": "multipart/form-data; boundary=x"}), stream())
    return [name for name, _ in (await parser.parse()).multi_items()]


@given(pieces=st.lists(PIECES, max_size=14), before=st.booleans())
def test_what_is_accepted_has_no_private_field_for_starlette(pieces, before):
    """The parser of vLLM's server sees no field that was not seen here."""
    body = (b'--x\r\nContent-Disposition: form-data; name="a"' if before else b"") + b"".join(pieces)
    try:
        check_form(b"x", body)
    except BadRequest:
        return

    try:
        names = asyncio.run(fields_of(body))
    except MultiPartException:
        return
    assert len(names) == body.count(b"--x\r\n")
    assert not any(name.startswith(PRIVATE) for name in names)


HOSTILE = [
    b"content-disposition",
    b"content-disposition ",
    b"content-disposition; name",
    b"Content-Disposition: form-data; name=",
    b"--x",
    b"\r\n--x",
    b"\r\n--x\r\n",
    b"\r\n--",
    b"-",
    b'"',
    b"\r\n",
    b": ",
    b";",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("around", [b"%b", b"--x\r\n%b", b"--x\r\nA: %b", b"--x\r\n" + DISPOSITION + b"\r\n\r\n%b"])
def test_sixteen_megabytes_of_anything_are_read_in_a_moment(piece, around):
    """An expression that goes back over them took two days for some of these."""
    body = around % (piece * (16 * 1024 * 1024 // len(piece)))

    began = time.process_time()
    with pytest.raises(BadRequest):
        check_form(b"x", body)
    assert time.process_time() - began < 2
