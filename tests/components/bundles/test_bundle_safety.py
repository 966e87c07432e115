"""What somebody may do to a bundle's files: nothing in them runs when it is loaded, and no change goes unseen."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_bundle import write_tiny_bundle
from transformers import AutoModelForCausalLM

from reflux.components.bundles.bundle import load_bundle
from reflux.components.bundles.bundle_digests import DIGESTED
from reflux.components.bundles.transformers_bundle import low_bit_config

LOADED_IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from reflux.components.bundles.bundle import load_bundle
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event == "pickle.find_class" else None)
load_bundle(Path(sys.argv[1]))
print("pickles:", len(seen))
"""
DATA = {".json", ".safetensors", ".bin", ".md", ".txt", ".jinja"}
"""Suffixes of what is read; code lies in runtime/ and in the two scripts, and runs when a person starts it."""


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("safety") / "bundle", tiny_model)


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_bundle_is_json_and_tensors(exported: Path) -> None:
    files = {path.relative_to(exported) for path in exported.rglob("*") if path.is_file()}
    code = {path for path in files if path.suffix == ".py"}
    assert {path for path in code if path.parts[0] != "runtime"} == {Path("calibrate.py"), Path("fallback.py")}
    assert {path.suffix or path.name for path in files - code} <= DATA | {"METADATA"}
    assert (exported / "policy_table.bin").read_bytes().startswith(b"RFXTABLE")


def test_nothing_in_it_runs_on_load(bundle: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (bundle / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (bundle / name).write_bytes(pickle.dumps(Bomb(ran)))
    description = json.loads((bundle / "quant_config.json").read_text())
    del description["files"]["config.json"]  # an attacker who writes one file writes both
    (bundle / "quant_config.json").write_text(json.dumps(description))
    config = json.loads((bundle / "config.json").read_text())
    theirs = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (bundle / "config.json").write_text(json.dumps(config | {"auto_map": theirs}))
    done = subprocess.run(
        [sys.executable, "-c", LOADED_IN_ANOTHER_PROCESS, str(bundle)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "pickles: 0"
    assert not ran.exists()


@pytest.mark.parametrize("name", DIGESTED)
def test_a_file_that_was_changed_is_named(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    place = content.rindex(b"}") if name.endswith(".json") else len(content) - 5
    content[place : place + 1] = b" }" if name.endswith(".json") else bytes([content[place] ^ 1])
    (bundle / name).write_bytes(content)
    message = rf"{name}: its sha256 is not the one in quant_config\.json, it was changed or cut short"
    with pytest.raises(ValueError, match=message):
        load_bundle(bundle)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(bundle, config=low_bit_config(bundle))


def test_a_file_that_is_gone_is_named(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing, the bundle was exported with it"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        ("model.safetensors", 5000, "cannot be read as safetensors"),
        ("model.safetensors", 4, "cannot be read as safetensors"),
        ("quant_config.json", 2000, "is no JSON, it was changed or cut short"),
        ("quant_config.json", 0, "is no JSON, it was changed or cut short"),
    ],
)
def test_a_file_cut_short_is_named(bundle: Path, name: str, kept: int, message: str) -> None:
    path = bundle / name
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        load_bundle(bundle)
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        AutoModelForCausalLM.from_pretrained(bundle, config=low_bit_config(bundle))


@pytest.mark.parametrize("part", ["scheme", "scheme_sha256", "weights", "activations", "files"])
def test_a_description_that_lacks_a_part_is_refused(bundle: Path, part: str) -> None:
    description = json.loads((bundle / "quant_config.json").read_text())
    del description[part]
    (bundle / "quant_config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=rf"quant_config\.json: has no '{part}', it was changed"):
        load_bundle(bundle)


def test_master_weights_in_its_place_are_refused(bundle: Path) -> None:
    weights = load_file(bundle / "model.safetensors")
    save_file(weights, bundle / "model.safetensors", metadata={"checkpoint": "latent", "format": "pt"})
    with pytest.raises(ValueError, match="holds latent master weights, not deployed ones"):
        low_bit_config(bundle)


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_policy_table_cut_short_is_refused(bundle: Path, kept: int) -> None:
    table = bundle / "policy_table.bin"
    table.write_bytes(table.read_bytes()[:kept])
    with pytest.raises(ValueError, match="policy table: "):
        load_bundle(bundle)
    with pytest.raises(ValueError, match="policy table: "):
        AutoModelForCausalLM.from_pretrained(bundle, config=low_bit_config(bundle))
