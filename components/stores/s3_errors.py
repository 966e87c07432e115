"""What an error of S3 means: whether trying again can help, for how long to try, and what to tell a person.

Only what the network or an overloaded server causes is tried again. A wrong key, a missing bucket, a certificate that
is not trusted stay wrong, and are said at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from urllib3.exceptions import HTTPError

log = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES = (ClientError, BotoCoreError, Boto3Error, HTTPError)  # botocore lets urllib3's through while it reads a body
MISSING = {"404", "NoSuchKey", "NotFound"}
CHANGED = {"412", "PreconditionFailed"}
NO_UPLOAD = {"404", "NoSuchUpload"}
_AGAIN = {
    "409", "ConditionalRequestConflict",  # another conditional write is under way: its outcome decides
    "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests",
}  # fmt: skip
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or REFLUX_STORE_* where REFLUX_STORE_ENDPOINT_URL is set"
_DENIED = "the key may not do this: it needs to read, write, list and delete below the store's prefix"
_ADVICE = {
    "403": _DENIED,
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AuthorizationHeaderMalformed": "the region is another one; set AWS_REGION",
    "EntityTooLarge": "the server refuses objects of this size",
    "ExpiredToken": "the session token has expired: get new credentials and run the same command again",
    "ExpiredTokenException": "the session token has expired: get new credentials and run the same command again",
    "InvalidAccessKeyId": f"the server does not know this access key; see {_KEYS}",
    "InvalidToken": "the session token is not valid with this key; see AWS_SESSION_TOKEN",
    "NoSuchBucket": "there is no such bucket at this endpoint; create it, or name another in --store",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "PreconditionFailed": "the object was changed while it was being read",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's: set it",
    "SignatureDoesNotMatch": f"the secret key is not the one of this access key; see {_KEYS}",
}


def code(error: BaseException | None) -> str:
    """S3's name of the error, or the HTTP status where the answer had no body; "" if the server did not answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def transient(error: BaseException) -> bool:
    """Whether the same request can succeed later."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return (status >= 500 and status != 501) or status == 429 or code(error) in _AGAIN
    if isinstance(error, SSLError):  # a handshake that was cut off heals, a certificate does not
        return not _untrusted(error) and "WRONG_VERSION_NUMBER" not in str(error)
    return isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError, HTTPError))


def explanation(error: BaseException, meaning: str = "") -> str:
    """What helps, and the error in the words of the client. `meaning`: its code, where the answer itself had none."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return f"no credentials: set {_KEYS}"
    if isinstance(error, SSLError) and _untrusted(error):
        return f"the server's certificate is not trusted; name its authority's PEM file in AWS_CA_BUNDLE ({error})"
    if isinstance(error, SSLError):
        return f"no TLS connection: https:// in the endpoint is for servers that speak TLS ({error})"
    advice = _ADVICE.get(meaning or code(error))
    return f"{advice} ({error})" if advice else str(error)


class Patience:
    """The time that one operation has: it ends `seconds` after the first failure since the last sign of life.

    So an operation is over within `seconds` and one more attempt, which itself ends when the server is silent for the
    client's timeout.
    """

    def __init__(self, seconds: float, where: str) -> None:
        self.seconds, self.where = seconds, where
        self.renew()

    def renew(self) -> None:
        """The store answered: what fails from here on has the whole time again."""
        self._failed_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def wait(self, error: BaseException) -> None:
        """Sleep a little longer than the last time. Raises the error if it stays, or if the time is over."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        left = self._failed_at + self.seconds - now
        if not transient(error) or left <= 0:
            raise error
        log.warning("store %s: %s; trying again for %.0f s", self.where, error, left)
        time.sleep(min(self._pause_s * random.uniform(0.5, 1.0), left))  # spread: many readers lose one server at once
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def patiently(operation: Callable[[], T], patience: Patience) -> T:
    """The outcome of an operation that may be repeated."""
    while True:
        try:
            return operation()
        except FAILURES as error:
            patience.wait(error)


def _untrusted(error: SSLError) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)
