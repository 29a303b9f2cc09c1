"""TLS 1.3 records that hold key updates (RFC 8446, 4.6.3) and nothing else; Python's ssl module cannot send them."""

import hmac
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HANDSHAKE, APPLICATION_DATA = 22, 23
QUIET, ASKING = b"\x18\0\0\x01\0", b"\x18\0\0\x01\1"  # the second asks the other side to change its key, too
HASH = "sha384"  # of TLS_AES_256_GCM_SHA384, which is OpenSSL's first choice


def key_updates(secret, count, message=QUIET, *, before=0):
    """Return the records of so many key updates, each under the key that the one before it announced.

    ``secret`` is the sender's first application traffic secret; ``before``: how many records it has sent under it.
    """
    records = bytearray()
    sealed = before
    for _ in range(count):
        records += _record(secret, sealed, message, HANDSHAKE)
        secret = _expand(secret, b"traffic upd", len(secret))
        sealed = 0
    return bytes(records)


def traffic_secret(keylog, label):
    """Return the secret that an ``SSLContext.keylog_filename`` holds under a label."""
    (line,) = [line for line in keylog.read_text().splitlines() if line.startswith(f"{label} ")]
    return bytes.fromhex(line.split()[2])


def _record(secret, number, message, kind):
    plain = message + bytes([kind])
    head = struct.pack(">BHH", APPLICATION_DATA, 0x0303, len(plain) + 16)
    iv = int.from_bytes(_expand(secret, b"iv", 12), "big") ^ number
    return head + AESGCM(_expand(secret, b"key", 32)).encrypt(iv.to_bytes(12, "big"), plain, head)


def _expand(secret, label, size):
    """HKDF-Expand-Label without a context (RFC 8446, 7.1), of no more than one hash."""
    label = b"tls13 " + label
    info = struct.pack(">HB", size, len(label)) + label + b"\0"
    return hmac.digest(secret, info + b"\1", HASH)[:size]
