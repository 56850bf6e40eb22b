"""What the refusals of stores mean for a person; their clients give little more than texts."""

from __future__ import annotations

import re

#: S3's word for temporary keys whose time is over.
EXPIRED = "ExpiredToken"
#: S3's words for refusals. The SDK in pyarrow writes some of them as THEY_ARE.
_MEANINGS = {
    EXPIRED: "the keys have expired",
    "RequestExpired": "the keys have expired",
    "InvalidToken": "the session token is wrong",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "AuthorizationHeaderMalformed": "check the region",
    "PermanentRedirect": "the bucket is at another endpoint: check the region",
}
#: Answers to HEAD have no body with a word, so that pyarrow's client tells only the status.
_BARE = re.compile(r"HTTP status (400|301)\) during Head")
_BARE_MEANINGS = {
    "400": "check the region, and whether the keys have expired",
    "301": "the bucket is at another endpoint: check the region",
}
#: Texts of curl, Rust's reqwest and aiohttp where no server was reached.
_UNREACHABLE = {
    "no server has the name of the endpoint": re.compile(
        r"(?i)resolve host|dns error|lookup address|name or service not known"
    ),
    "the endpoint does not speak https": re.compile(
        r"SSL connect error|wrong version number|InvalidContentType|corrupt message"
    ),
    "cannot connect to the endpoint": re.compile(
        r"(?i)(cannot|could not|failed to) connect|connection ?refused|kind: connect"
    ),
}


def refusal(text: str) -> str | None:
    """Return what a refusal in an error's text means; None: there is none with a meaning.

    >>> refusal("AWS Error REQUEST_TIME_TOO_SKEWED during ListObjectsV2 operation")
    'the clock of this machine is wrong (RequestTimeTooSkewed)'
    """
    plain = text.replace("_", "").lower()
    for word, meaning in _MEANINGS.items():
        if word.lower() in plain:
            return f"{meaning} ({word})"
    bare = _BARE.search(text)
    return None if bare is None else _BARE_MEANINGS[bare[1]]


def may_be_expired(text: str) -> bool:
    """Return whether keys that have expired may be the cause of an error with this text."""
    bare = _BARE.search(text)
    return EXPIRED in text or (bare is not None and bare[1] == "400")


def unreachable(text: str) -> str | None:
    """Return why no server was reached, by an error's text; None: one was.

    >>> unreachable("curlCode: 6, Could not resolve hostname; Details: Could not resolve host: h")
    'no server has the name of the endpoint'
    """
    return next((why for why, pattern in _UNREACHABLE.items() if pattern.search(text)), None)
