"""How to reach S3: one frozen object, read from the environment once, from which every client is fed.

boto3, pyarrow and MLflow read different variables (pyarrow ignores AWS_ENDPOINT_URL and AWS_CA_BUNDLE, MLflow has names
of its own), so none of them is left to its own search: `boto3_options`, `arrow_options` and `mlflow_env` say the same
thing to each. Only credentials that are None are searched for by the client (profiles, instance roles).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADDRESSING = ("path", "virtual")
PATIENCE_S = 60.0
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """How to reach S3. ValueError names the field, its value and what is allowed."""

    endpoint: str | None = None
    """http://… or https://… of a server other than AWS; the scheme turns TLS on or off."""
    region: str = "us-east-1"
    """Custom servers mostly ignore it, but signing needs one."""
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    """Of temporary credentials."""
    ca_bundle: str | None = None
    """PEM file of the authorities to trust instead of the system's."""
    verify_tls: bool = True
    """False accepts any certificate: whoever is on the network can then read and change everything."""
    addressing: str = "path"
    """path: endpoint/bucket/key, which every server knows; virtual: bucket.endpoint/key, where one insists on it."""
    patience_s: float = PATIENCE_S
    """Seconds for which an operation is tried again while the store is away; the bound of every retry."""

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"S3 endpoint {self.endpoint!r}: allowed is http://HOST[:PORT] or https://HOST[:PORT]")
            if "@" in parts.netloc:
                raise ValueError(
                    f"S3 endpoint at {parts.hostname}: credentials belong into AWS_ACCESS_KEY_ID and so on"
                )
        if self.addressing not in ADDRESSING:
            raise ValueError(f"S3 addressing {self.addressing!r}: allowed are {', '.join(ADDRESSING)}")
        if not 0 <= self.patience_s <= 86_400:
            raise ValueError(f"S3 patience {self.patience_s}: allowed are 0 to 86400 seconds")
        encrypted = self.endpoint is None or self.endpoint.startswith("https:")
        if encrypted and self.ca_bundle is not None and not Path(self.ca_bundle).is_file():
            raise ValueError(f"S3 CA bundle {self.ca_bundle!r}: no such file; a PEM file of certificates is needed")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> S3Settings:
        """The AWS_* variables; AWS_ENDPOINT_URL_S3 and AWS_REGION win over AWS_ENDPOINT_URL and AWS_DEFAULT_REGION."""
        return cls(
            endpoint=environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
            region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1",
            access_key=environ.get("AWS_ACCESS_KEY_ID") or None,
            secret_key=environ.get("AWS_SECRET_ACCESS_KEY") or None,
            session_token=environ.get("AWS_SESSION_TOKEN") or None,
            ca_bundle=environ.get("AWS_CA_BUNDLE") or None,
            **_manners(environ),
        )

    @classmethod
    def of_store(cls, environ: Mapping[str, str] = os.environ) -> S3Settings:
        """REFLUX_STORE_* where a store has an endpoint of its own, so that sources keep AWS_*; else AWS_*."""
        endpoint = environ.get("REFLUX_STORE_ENDPOINT_URL")
        if not endpoint:
            return cls.from_env(environ)
        return cls(
            endpoint=endpoint,
            region=environ.get("REFLUX_STORE_REGION") or "us-east-1",
            access_key=environ.get("REFLUX_STORE_ACCESS_KEY_ID") or None,
            secret_key=environ.get("REFLUX_STORE_SECRET_ACCESS_KEY") or None,
            session_token=environ.get("REFLUX_STORE_SESSION_TOKEN") or None,
            ca_bundle=environ.get("REFLUX_STORE_CA_BUNDLE") or environ.get("AWS_CA_BUNDLE") or None,
            **_manners(environ),
        )

    def env(self) -> dict[str, str]:
        """The variables from which `from_env` reads these settings in another process."""
        names = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.session_token,
            "AWS_CA_BUNDLE": self.ca_bundle,
        }
        return {name: value for name, value in names.items() if value} | self._changed_manners()

    def store_env(self) -> dict[str, str]:
        """The variables from which `of_store` reads these settings in another process; they need an endpoint."""
        if self.endpoint is None:
            raise ValueError("REFLUX_STORE_ENDPOINT_URL: a store without an endpoint is reached by the AWS_* variables")
        names = {
            "REFLUX_STORE_ENDPOINT_URL": self.endpoint,
            "REFLUX_STORE_REGION": self.region,
            "REFLUX_STORE_ACCESS_KEY_ID": self.access_key,
            "REFLUX_STORE_SECRET_ACCESS_KEY": self.secret_key,
            "REFLUX_STORE_SESSION_TOKEN": self.session_token,
            "REFLUX_STORE_CA_BUNDLE": self.ca_bundle,
        }
        return {name: value for name, value in names.items() if value} | self._changed_manners()

    def mlflow_env(self) -> dict[str, str]:
        """The same for MLflow's artifacts in S3: it has its own names, and guesses where the bucket stands in a URL."""
        named = {"MLFLOW_S3_ENDPOINT_URL": self.endpoint} if self.endpoint else {}
        ignore = {} if self.verify_tls else {"MLFLOW_S3_IGNORE_TLS": "true"}
        return self.env() | named | ignore | {"MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE": self.addressing}

    def boto3_options(self) -> dict[str, Any]:
        """Arguments of boto3.client, except `config`, where `addressing` belongs."""
        return {
            "endpoint_url": self.endpoint,
            "region_name": self.region,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_session_token": self.session_token,
            "verify": (self.ca_bundle or True) if self.verify_tls else False,
        }

    def arrow_options(self) -> dict[str, Any]:
        """Arguments of pyarrow.fs.S3FileSystem, which cannot leave certificates unchecked: ValueError if it should."""
        parts = urlsplit(self.endpoint or "https://")
        if not self.verify_tls and parts.scheme == "https":
            raise ValueError(
                "REFLUX_S3_VERIFY_TLS=off: pyarrow always checks certificates; name the CA in AWS_CA_BUNDLE"
            )
        return {
            "endpoint_override": parts.netloc or None,
            "scheme": parts.scheme,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "session_token": self.session_token,
            "tls_ca_file_path": self.ca_bundle,
            "force_virtual_addressing": self.addressing == "virtual",
        }

    def _changed_manners(self) -> dict[str, str]:
        said = {
            "REFLUX_S3_VERIFY_TLS": "" if self.verify_tls else "off",
            "REFLUX_S3_ADDRESSING": "" if self.addressing == "path" else self.addressing,
            "REFLUX_S3_PATIENCE": "" if self.patience_s == PATIENCE_S else str(self.patience_s),
        }
        return {name: value for name, value in said.items() if value}


def _manners(environ: Mapping[str, str]) -> dict[str, Any]:
    """What AWS has no variable for."""
    verify = environ.get("REFLUX_S3_VERIFY_TLS") or "on"
    if verify not in _SWITCH:
        raise ValueError(f"REFLUX_S3_VERIFY_TLS {verify!r}: allowed are on and off")
    patience = environ.get("REFLUX_S3_PATIENCE") or str(PATIENCE_S)
    try:
        patience_s = float(patience)
    except ValueError:
        raise ValueError(f"REFLUX_S3_PATIENCE {patience!r}: a number of seconds is needed") from None
    addressing = environ.get("REFLUX_S3_ADDRESSING") or "path"
    return {"verify_tls": _SWITCH[verify], "addressing": addressing, "patience_s": patience_s}
