"""Encrypted payload between nodes (`cluster.encrypt`): AES-256-GCM, by the package `cryptography`.

Each side of a connection makes a fresh X25519 key, whose public half is under the MACs of the
handshake (`wire.PeerSession`). The payload key is derived from the shared secret and the cluster's
key (HKDF's extraction, RFC 5869). An attacker who recorded a connection and later learns the
cluster's key, for example from a process group's store, cannot read the payload.

Payload is sent in *records*: length, ciphertext and tag. A record's nonce is its number, so a
changed, missing, repeated or moved record is detected. No byte is used before its tag is verified.
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
    """Return the reason why this node cannot encrypt payload; "" if it can."""
    if find_spec("cryptography") is None:
        return (
            "cluster.encrypt needs the package cryptography: pip install 'creel-data[encryption]'"
        )
    return ""


class KeyAgreement:
    """One side's fresh key for a handshake; `public` is the half sent to the other side."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def cipher(self, session: wire.PeerSession, public: bytes) -> AESGCM:
        """Return the cipher of the payload; `public` is the other side's public key.

        Raises:
            MalformedError: `public` is no X25519 key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as e:
            raise MalformedError("not a public key of X25519") from e
        return AESGCM(hmac.digest(session.payload_salt, shared, "sha256"))


class Sealer:
    """Encrypts payload into records, in order."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher
        self._numbers = count()

    def record(self, buffers: list[memoryview]) -> tuple[memoryview, list[memoryview]]:
        """Return a record of the first bytes of the buffers, and the remaining buffers."""
        first, remaining = cut(buffers, RECORD_NBYTES)
        plain = first[0] if len(first) == 1 else b"".join(first)
        header = HEADER.pack(len(plain))
        sealed = self._cipher.encrypt(_NONCE.pack(next(self._numbers)), plain, header)
        return memoryview(header + sealed), remaining


class Opener:
    """Decrypts the payload of records, in order."""

    def __init__(self, cipher: AESGCM) -> None:
        self._cipher = cipher
        self._numbers = count()

    def following(self, header: bytes | bytearray) -> int:
        """Return the number of bytes that follow a record's header.

        Raises:
            MalformedError: the length is impossible for a record.
        """
        (nbytes,) = HEADER.unpack(header)
        if not 0 < nbytes <= RECORD_NBYTES:
            raise MalformedError(f"a record cannot have {nbytes} bytes")
        return int(nbytes) + _TAG_NBYTES

    def opened(self, header: bytes | bytearray, sealed: memoryview) -> bytes:
        """Return the payload of a record.

        Raises:
            MalformedError: this is not the next record that the other side sent.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_NONCE.pack(next(self._numbers)), sealed, bytes(header))
        except InvalidTag as e:
            raise MalformedError("a record of payload has a wrong tag") from e
