"""Bucket: what obstore's client of an address is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bucket(NamedTuple):
    """A bucket or container that obstore can read.

    Attributes:
        kind: name of the class of its client, in `obstore.store`.
        server: its address.
        config: the client's arguments.
        tag: which part of an answer's `meta` names the version of an object, as other clients do.
    """

    kind: str
    server: str
    config: Mapping[str, Any]
    tag: str = "e_tag"
