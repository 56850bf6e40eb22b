"""Encrypted payload between nodes (`cluster.encrypt`): AES-256-GCM, by the package `cryptography`.

Both sides of a connection make a fresh X25519 key each, whose public halves are under the MACs of
the handshake (`wire.PeerSession`). The key of the payload comes from what both have agreed on and
from the cluster's key (HKDF's extraction, RFC 5869): who recorded a connection and learns the
cluster's key later, or has read it where a process group's store showed it, can read nothing.

Payload travels in *records*: their length, then ciphertext and tag. A record's nonce is its number,
so none can be changed, left out, repeated or moved unnoticed; what a tag does not vouch for reaches
nobody.
"""

from __future__ import annotations

import hmac
import struct
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING

from creel.cache.memory.buffers import cut
from creel.daemon.peers import wire
from creel.errors import MalformedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Bytes of payload in a record: 1.2 times as fast as 256 KiB (benchmarks/peers.py).
RECORD_NBYTES = 64 << 10
HEADER = struct.Struct("<I")
_TAG_NBYTES = 16
_NONCE = struct.Struct("<Q4x")


def why_not() -> str:
    """Reason why nothing can be encrypted here; "" if it can."""
    if find_spec("cryptography") is None:
        return "cluster.encrypt needs the package cryptography: pip install 'creel[encryption]'"
    return ""


class KeyAgreement:
    """One side's fresh key of a handshake; `public` is what the other side is to know."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def cipher(self, session: wire.PeerSession, public: bytes) -> AESGCM:
        """The cipher of the payload; `public` is the other side's.

        Raises:
            MalformedError: that is no such key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as e:
            raise MalformedError("no public key of X25519") from e
        return AESGCM(hmac.digest(session.payload_salt, shared, "sha256"))


class Sealer:
    """Makes records of payload, in order."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher
        self._numbers = count()

    def record(self, buffers: list[memoryview]) -> tuple[memoryview, list[memoryview]]:
        """The record of the first bytes of some buffers, and the rest of these."""
        first, rest = cut(buffers, RECORD_NBYTES)
        plain = first[0] if len(first) == 1 else b"".join(first)
        header = HEADER.pack(len(plain))
        sealed = self._cipher.encrypt(_NONCE.pack(next(self._numbers)), plain, header)
        return memoryview(header + sealed), rest


class Opener:
    """Gets payload back from records, in order."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher
        self._numbers = count()

    def following(self, header: bytes | bytearray) -> int:
        """Bytes that follow a record's header.

        Raises:
            MalformedError: no record has as many bytes.
        """
        (nbytes,) = HEADER.unpack(header)
        if not 0 < nbytes <= RECORD_NBYTES:
            raise MalformedError(f"a record of {nbytes} bytes")
        return int(nbytes) + _TAG_NBYTES

    def opened(self, header: bytes | bytearray, sealed: memoryview) -> bytes:
        """The payload of a record.

        Raises:
            MalformedError: it is not the next one that the other side sent.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_NONCE.pack(next(self._numbers)), sealed, bytes(header))
        except InvalidTag as e:
            raise MalformedError("payload that its sender did not send, or not here") from e
