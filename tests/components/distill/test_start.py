"""A training that goes on from an earlier one: from its master weights and table, and from nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_chain
import torch
from safetensors.torch import load, load_file, save_file
from tiny_bundle import write_tiny_bundle
from tiny_chain import Chain

from reflux.components.algorithms.low_bit import Scheme
from reflux.components.artifacts import Artifact
from reflux.components.bundles.policy_table import decode
from reflux.components.distill.start import find_start
from reflux.components.distill.student import make_student
from reflux.components.models import load_model

SCHEME = Scheme()


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def earlier(chain: Chain) -> Artifact:
    """Quantisation-aware distillation on the teacher's answers."""
    return chain.distilled(objective="forward_kl", on_policy_fraction=0.0)


def place(chain: Chain, artifact: Artifact) -> Path:
    return chain.folder / "objects" / artifact.stage / artifact.key


def test_training_goes_on_where_the_earlier_one_ended(chain: Chain, earlier: Artifact) -> None:
    later = chain.distilled(start_uri=str(place(chain, earlier)), warmup_steps=0)
    assert later.metrics["validation_loss_before_nats"] != pytest.approx(earlier.metrics["validation_loss_before_nats"])
    fresh = chain.distilled(objective="forward_kl", on_policy_fraction=0.0, start_uri=str(place(chain, earlier)))
    ended = earlier.metrics["validation_loss_ema_nats"]
    assert fresh.metrics["validation_loss_before_nats"] == pytest.approx(ended, rel=1e-5)
    assert fresh.key != earlier.key
    assert "start_uri" in fresh.record.sources


@pytest.mark.parametrize("form", ["artifact", "manifest", "files"])
def test_the_start_is_the_master_weights_and_the_table(
    chain: Chain, earlier: Artifact, tmp_path: Path, form: str
) -> None:
    where = place(chain, earlier)
    if form == "manifest":
        where /= "manifest.json"
    if form == "files":
        earlier.download_all("", where := tmp_path / "files")
    start = find_start(where, SCHEME)
    model = make_student(chain.training(), load_model(chain.model), start.policy(), start)
    held = dict(model.named_parameters())
    for name, value in load(earlier.file("latent.safetensors")).items():
        assert torch.equal(held[name], value), name
    table = decode(earlier.file("policy_table.bin"))
    torch.testing.assert_close(model.policy.scales(), table.scales())


def test_adapters_stand_on_the_earlier_weights(chain: Chain, earlier: Artifact) -> None:
    start = find_start(place(chain, earlier), SCHEME)
    config = chain.training(lora_rank=2)
    model = make_student(config, load_model(chain.model), start.policy(), start)
    name = "model.layers.0.mlp.down_proj"
    expected = load(earlier.file("latent.safetensors"))[f"{name}.weight"]
    assert torch.equal(model.get_submodule(name).latent(), expected)


def test_deployed_weights_are_refused(chain: Chain, earlier: Artifact, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", chain.model)
    with pytest.raises(ValueError, match="is a bundle, whose deployed weights lie on the grid"):
        find_start(bundle, SCHEME)
    earlier.download_all("", files := tmp_path / "files")
    weights = load_file(files / "latent.safetensors")
    save_file(weights, files / "latent.safetensors", metadata={"checkpoint": "deployed"})
    start = find_start(files, SCHEME)
    with pytest.raises(ValueError, match=r"start_uri: latent\.safetensors is not marked as master weights"):
        make_student(chain.training(), load_model(chain.model), start.policy(), start)


def test_another_scheme_or_another_stage_is_refused(chain: Chain, earlier: Artifact) -> None:
    where = place(chain, earlier)
    with pytest.raises(ValueError, match=r'was trained as .*"weight_bits": 4.* this student is .*"weight_bits": 8'):
        find_start(where, Scheme(weight_bits=8))
    with pytest.raises(ValueError, match="is an artifact of profile_kv; a training begins with one of distill"):
        find_start(place(chain, chain.profile), SCHEME)
    with pytest.raises(ValueError, match=r"has no scheme\.json; a folder objects/distill/KEY of a store is expected"):
        find_start(chain.folder, SCHEME)
    with pytest.raises(ValueError, match="is a model in full precision, which is a student"):
        find_start(chain.model, SCHEME)


def test_what_was_changed_since_is_refused(chain: Chain, earlier: Artifact, tmp_path: Path) -> None:
    shutil.copytree(place(chain, earlier), copy := tmp_path / "copy")
    shards = {shard.name: shard.object.rpartition("/")[2] for shard in earlier.shards()}
    weights = copy / shards["latent.safetensors"]
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"is not what manifest\.json says of latent\.safetensors"):
        find_start(copy, SCHEME)
    find_start(copy, SCHEME, whole=False)  # where only headers of weights were fetched
    weights.unlink()
    with pytest.raises(ValueError, match=r"missing \(latent.safetensors\)"):
        find_start(copy, SCHEME, whole=False)
    (copy / "manifest.json").write_text(json.dumps({"no": "manifest"}))
    with pytest.raises(ValueError, match=r"manifest.json"):
        find_start(copy, SCHEME)
