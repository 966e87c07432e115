"""A source is what its content is: found by many kinds of address, known by one digest."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest
from servers import seaweed

from reflux.components import sources
from reflux.components.model_files import require_model_files
from reflux.components.sources import bytes_to_fetch, digest, fetch, resolve
from reflux.components.storage import S3Settings, Store


def test_a_file_is_known_by_its_bytes_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b b.jsonl"):
        (tmp_path / name).write_text("one line")
    expected = f"sha256:{hashlib.sha256(b'one line').hexdigest()}"
    assert digest(fetch(str(tmp_path / "a.jsonl"))) == digest(fetch((tmp_path / "b b.jsonl").as_uri())) == expected
    source = resolve("prompts_uri", str(tmp_path / "a.jsonl"))
    assert (source.field, source.path, source.digest) == ("prompts_uri", tmp_path / "a.jsonl", expected)


def test_a_folder_is_known_by_the_paths_and_bytes_of_its_files(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, str]) -> str:
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(content)
        return digest(tmp_path / name)

    base = folder("one", {"config.json": "{}", "sub/weights": "w"})
    assert folder("two", {"sub/weights": "w", "config.json": "{}"}) == base
    others = [{"config.json": "{}", "sub/weights": "x"}, {"config.json": "{}", "weights": "w"}, {"config.json": "{}"}]
    assert len({base, *(folder(f"other {n}", files) for n, files in enumerate(others))}) == 4
    (tmp_path / "linked").symlink_to(tmp_path / "one")
    assert digest(fetch(str(tmp_path / "linked"))) == base
    (tmp_path / "two" / "hidden").symlink_to(tmp_path / "one")
    with pytest.raises(ValueError, match="hidden: a link to a folder"):
        digest(tmp_path / "two")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: the folder holds no file"):
        digest(tmp_path / "empty")


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """Caches of models keep files under their hash and link to them; the extension says how to read one."""
    (tmp_path / "blob").write_text("x")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    assert fetch(str(tmp_path / "model.gguf")).suffix == ".gguf"


def test_objects_of_s3_are_fetched_once_per_version(s3: S3Settings, tmp_path: Path) -> None:
    store = Store.open(f"s3://{seaweed.BUCKET}/sources", s3)
    for key in ("model/config.json", "model/sub/weights", "models/other", "prompts.jsonl"):
        store.write(key, key.encode())
    file = fetch(f"{store.uri}/prompts.jsonl", s3, tmp_path / "cache")
    assert (file.name, file.read_text()) == ("prompts.jsonl", "prompts.jsonl")
    folder = fetch(f"minio://{seaweed.BUCKET}/sources/model/?endpoint=x", s3, tmp_path / "cache")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "config.json",
        "sub/weights",
    ]
    before = file.stat().st_mtime_ns
    assert fetch(f"{store.uri}/prompts.jsonl", s3, tmp_path / "cache") == file
    assert file.stat().st_mtime_ns == before
    store.write("prompts.jsonl", b"other content")
    changed = fetch(f"{store.uri}/prompts.jsonl", s3, tmp_path / "cache")
    assert changed.read_text() == "other content"
    assert digest(changed) != digest(file)
    with pytest.raises(ValueError, match=f"prompts_uri: source {store.uri}/none: no object"):
        resolve("prompts_uri", f"{store.uri}/none", s3)


def test_a_model_in_s3_is_looked_at_without_its_weights(s3: S3Settings, tmp_path: Path, tiny_model: Path) -> None:
    store = Store.open(f"s3://{seaweed.BUCKET}/look", s3)
    for file in tiny_model.iterdir():
        store.write(f"model/{file.name}", file.read_bytes())
    uri = f"{store.uri}/model"
    looked = fetch(uri, s3, tmp_path / "cache", weights=False)
    require_model_files(looked)
    weights = looked / "model.safetensors"
    assert weights.stat().st_size == (tiny_model / "model.safetensors").stat().st_size
    assert weights.stat().st_blocks * 512 < weights.stat().st_size / 4, "only the header was fetched"
    assert (looked / "config.json").read_bytes() == (tiny_model / "config.json").read_bytes()
    assert digest(fetch(uri, s3, tmp_path / "cache")) == digest(tiny_model), "never taken for the model itself"
    store.write("model/model.safetensors", (tiny_model / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        require_model_files(fetch(uri, s3, tmp_path / "cache", weights=False))
    store.write("model/model.safetensors", b"<html>")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        require_model_files(fetch(uri, s3, tmp_path / "cache", weights=False))
    assert bytes_to_fetch(uri, s3) == sum(entry.bytes for entry in store.entries("model").values())
    assert bytes_to_fetch(str(tiny_model), s3) == 0
    empty = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
    store.write("model.gguf", empty + bytes(3_000_000))
    looked = fetch(f"{store.uri}/model.gguf", s3, tmp_path / "cache", weights=False)
    require_model_files(looked)
    assert looked.stat().st_size == len(empty) + 3_000_000 > 100 * looked.stat().st_blocks * 512


def test_what_ships_with_reflux_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "BUILTIN", tmp_path)
    (tmp_path / "prompts.jsonl").write_text("{}")
    assert fetch("builtin:prompts.jsonl") == tmp_path / "prompts.jsonl"
    for name in ("promts.jsonl", "../prompts.jsonl", ""):
        with pytest.raises(ValueError, match=r"builtin.*There are \['prompts.jsonl'\]"):
            fetch(f"builtin:{name}")
    with pytest.raises(ValueError, match=r"did you mean 'prompts.jsonl'\?"):
        fetch("builtin:promts.jsonl")


def test_a_model_inside_a_package_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "package_with_model"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"exactly one GGUF file is expected in it, found \[\]"):
        fetch("package:package_with_model")
    (package / "data" / "model.gguf").write_bytes(b"GGUF")
    assert fetch("package:package_with_model") == package / "data" / "model.gguf"
    assert "package_with_model" not in sys.modules
    for name in ("no_such_package_here", "package_with_model.data", "", "sys"):
        with pytest.raises(ValueError, match=f"package:{name}: no such package"):
            fetch(f"package:{name}")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "no such file or folder"),
        ("/no/such/file.jsonl", "'/no/such/file.jsonl': no such file or folder"),
        ("data/prompts.jsonl", "no such file or folder"),
        ("gs://bucket/x?token=secret", "gs://bucket/x: allowed is a path, file://"),
        ("no-such-org/no-such-model", "source no-such-org/no-such-model: no such path here, and the Hugging Face hub"),
    ],
)
def test_what_cannot_be_found_is_named(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fetch(uri)
