"""One settings object, and what each client really does with it, on real servers with and without TLS."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from servers import certificates, fault_proxy, seaweed
from servers.fault_proxy import Fault

from reflux.components.storage import Store, StoreError
from reflux.components.stores.s3_settings import S3Settings
from reflux.components.stores.s3_store import arrow_filesystem

FULL = S3Settings(
    endpoint="http://e:1", region="eu", access_key="a", secret_key="b", session_token="c", verify_tls=False,
    addressing="virtual", patience_s=7.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    """Settings of a server that speaks only TLS, with a certificate of an authority that nobody knows."""
    certificate = certificates.make(tmp_path_factory.mktemp("certificates"))
    with seaweed.running(tmp_path_factory.mktemp("tls"), certificate) as settings:
        yield settings


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "REFLUX_S", "MLFLOW_")):
            monkeypatch.delenv(name)


def test_settings_survive_the_environment_of_another_process(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    for settings in (FULL, replace(FULL, ca_bundle=str(tmp_path / "ca.pem"), verify_tls=True)):
        assert S3Settings.from_env(settings.env()) == settings
        assert S3Settings.of_store(settings.env()) == settings
        assert S3Settings.of_store(settings.store_env()) == settings
        assert S3Settings.of_store({**S3Settings(region="other").env(), **settings.store_env()}) == settings
    assert S3Settings.from_env({}) == S3Settings()
    named = {"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_ENDPOINT_URL": "http://all", "AWS_DEFAULT_REGION": "r"}
    assert S3Settings.from_env(named) == S3Settings(endpoint="http://s3", region="r")


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    for environ, message in (
        ({"AWS_ENDPOINT_URL": "127.0.0.1:8333"}, r"endpoint '127.0.0.1:8333': allowed is http://HOST"),
        ({"AWS_ENDPOINT_URL": "http://me:hunter2@host"}, "credentials belong into AWS_ACCESS_KEY_ID"),
        ({"AWS_CA_BUNDLE": "/no/ca.pem"}, "CA bundle '/no/ca.pem': no such file"),
        ({"AWS_CA_BUNDLE": "/no/ca.pem", "AWS_ENDPOINT_URL": "https://host"}, "a PEM file of certificates is needed"),
        ({"REFLUX_S3_VERIFY_TLS": "0"}, "REFLUX_S3_VERIFY_TLS '0': allowed are on and off"),
        ({"REFLUX_S3_ADDRESSING": "dns"}, "addressing 'dns': allowed are path, virtual"),
        ({"REFLUX_S3_PATIENCE": "long"}, "REFLUX_S3_PATIENCE 'long': a number of seconds"),
        ({"REFLUX_S3_PATIENCE": "-1"}, "patience -1.0: allowed are 0 to 86400"),
    ):
        with pytest.raises(ValueError, match=message) as refusal:
            S3Settings.from_env(environ)
        assert "hunter2" not in str(refusal.value)
    plain = {"AWS_CA_BUNDLE": "/no/ca.pem", "AWS_ENDPOINT_URL": "http://host"}
    assert S3Settings.from_env(plain).ca_bundle == "/no/ca.pem", "nothing of it is needed there"


def test_each_client_is_told_the_same(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    secure = replace(FULL, endpoint="https://e:1", ca_bundle=str(tmp_path / "ca.pem"), verify_tls=True)
    assert secure.boto3_options()["verify"] == secure.arrow_options()["tls_ca_file_path"] == secure.ca_bundle
    assert secure.mlflow_env()["AWS_CA_BUNDLE"] == secure.ca_bundle
    assert "MLFLOW_S3_IGNORE_TLS" not in secure.mlflow_env()
    assert secure.mlflow_env()["MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE"] == "virtual"
    assert secure.arrow_options()["force_virtual_addressing"] is True
    assert (secure.arrow_options()["endpoint_override"], secure.arrow_options()["scheme"]) == ("e:1", "https")
    assert S3Settings().boto3_options()["verify"] is True, "checked unless somebody says otherwise"
    careless = replace(FULL, endpoint="https://e:1")
    assert careless.boto3_options()["verify"] is False
    assert careless.mlflow_env()["MLFLOW_S3_IGNORE_TLS"] == "true"
    with pytest.raises(ValueError, match="pyarrow always checks certificates; name the CA in AWS_CA_BUNDLE"):
        careless.arrow_options()


def mlflow_round_trip(settings: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A file through MLflow's own S3 client, configured by nothing but the environment."""
    from mlflow.store.artifact.s3_artifact_repo import S3ArtifactRepository, _cached_get_s3_client

    _cached_get_s3_client.cache_clear()  # as in a process of its own
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name, value in settings.mlflow_env().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "page.html").write_text("<p>a page</p>")
    repository = S3ArtifactRepository(f"s3://{seaweed.BUCKET}/mlflow/{uuid.uuid4().hex}")
    repository.log_artifact(str(tmp_path / "page.html"))
    return Path(repository.download_artifacts("page.html", str(tmp_path / "back"))).read_text()


def test_boto3_pyarrow_and_mlflow_reach_a_server_with_a_certificate_of_an_own_authority(
    tls: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert str(tls.endpoint).startswith("https://")
    store = Store.open(f"minio://{seaweed.BUCKET}/tls", S3Settings.of_store(tls.store_env()))
    store.write("key", b"content")
    assert store.read("key") == b"content"
    with arrow_filesystem(tls).open_input_file(f"{seaweed.BUCKET}/tls/key") as stream:
        assert stream.read() == b"content"
    (tmp_path / "back").mkdir()
    assert mlflow_round_trip(tls, monkeypatch, tmp_path) == "<p>a page</p>"


def test_a_certificate_that_is_not_trusted_is_refused_at_once_unless_checks_are_off(tls: S3Settings) -> None:
    stranger = replace(tls, ca_bundle=None)
    with pytest.raises(StoreError, match="certificate is not trusted; name its authority's PEM file in AWS_CA_BUNDLE"):
        Store.open(f"s3://{seaweed.BUCKET}", stranger).read("key")
    with pytest.raises(OSError, match=r"(?i)ssl|certificate"):
        arrow_filesystem(stranger).open_input_file(f"{seaweed.BUCKET}/tls/key")
    careless = Store.open(f"s3://{seaweed.BUCKET}/careless", replace(stranger, verify_tls=False))
    careless.write("key", b"content")
    assert careless.read("key") == b"content"


def test_a_scheme_that_the_server_does_not_speak_is_said(tls: S3Settings, s3: S3Settings) -> None:
    secure = replace(s3, endpoint=str(s3.endpoint).replace("http:", "https:"))
    with pytest.raises(StoreError, match="no TLS connection: https:// in the endpoint is for servers that speak TLS"):
        Store.open(f"s3://{seaweed.BUCKET}", secure).read("key")
    plain = replace(tls, endpoint=str(tls.endpoint).replace("https:", "http:"))
    with pytest.raises(StoreError, match=r"400|reset"):
        Store.open(f"s3://{seaweed.BUCKET}", replace(plain, patience_s=0.0)).read("key")


def test_every_client_sends_the_session_token_signs_for_the_region_and_puts_the_bucket_into_the_path(
    s3: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with fault_proxy.in_front_of(s3) as proxy:
        named = str(proxy.settings.endpoint).replace(
            "127.0.0.1", "localhost"
        )  # a host that could carry a bucket's name
        settings = replace(
            proxy.settings, endpoint=named, session_token="a-session", region="eu-test-1", patience_s=0.0
        )
        for method in ("HEAD", "GET", "PUT", "POST"):
            proxy.next(method, "/", *[Fault(status=403, code="InvalidToken")] * 10)
        with pytest.raises(StoreError, match="the session token is not valid"):
            Store.open(f"s3://{seaweed.BUCKET}", settings).read("key")
        with pytest.raises(OSError, match=r"403|ACCESS_DENIED"):
            arrow_filesystem(settings).open_input_file(f"{seaweed.BUCKET}/key")
        with pytest.raises(Exception, match="InvalidToken"):
            mlflow_round_trip(settings, monkeypatch, tmp_path)
        for request in proxy.seen:
            assert request.target.startswith(f"/{seaweed.BUCKET}/")
            assert request.headers.get("x-amz-security-token") == "a-session", request
            assert "/eu-test-1/s3/aws4_request" in request.headers["authorization"]
        agents = {request.headers["user-agent"].partition("/")[0] for request in proxy.seen}
        assert len(agents) == 2, "boto3's (twice) and that of the C++ client in pyarrow"
