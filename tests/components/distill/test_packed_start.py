"""A training that begins with the codes of a checkpoint of compressed-tensors, as llm-compressor writes one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from safetensors.torch import load, load_file, save_file
from stage_writers import writer_for
from tiny_bundle import write_tiny_bundle
from tiny_chain import Chain

from reflux.components import weight_headers
from reflux.components.algorithms.low_bit import LowBitLinear, Scheme
from reflux.components.bundles.bundle import dequantized
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.distill.start import find_start
from reflux.components.distill.student import make_student
from reflux.components.models import load_model

SCHEME = Scheme(zero_points=True)
LINEAR = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


def checkpoint(folder: Path, model: Path, *, norms: float = 1.0, **options: Any) -> Path:
    """As another method leaves it: other weights than the model's have been rounded, and nothing of ours is beside."""
    other = Path(shutil.copytree(model, folder.with_name("other")))
    changed = load_model(other)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if "_proj" in name:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
            if "layernorm" in name:
                weight.mul_(norms)
    changed.save_pretrained(other)
    write_tiny_bundle(folder, other, activation_bits=16, **options)
    (folder / "quant_config.json").unlink()
    return folder


def values(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name.removesuffix(".weight_packed") for name in file.keys() if name.endswith("_packed")]  # noqa: SIM118
        zero = {name: f"{name}.weight_zero_point" for name in names}
        packed = {name: {"bits": 4, "zero_point": zero[name] if zero[name] in file.keys() else 0} for name in names}  # noqa: SIM118
        return {name: value for name, value in dequantized(file, packed) if "_proj" in name}


def begun(chain: Chain, folder: Path, **options: Any) -> Any:
    config = chain.training(weight_zero_points=True, activation="plain", **options)
    scheme = Scheme(zero_points=True, activation="plain")
    return make_student(config, load_model(chain.model), None, find_start(folder, scheme))


@pytest.mark.parametrize("zero_points", [True, False])
def test_it_begins_with_the_checkpoints_weights_and_near_its_own(
    chain: Chain, tmp_path: Path, zero_points: bool
) -> None:
    folder, own = checkpoint(tmp_path / "ckpt", chain.model, zero_points=zero_points), load_model(chain.model)
    model = begun(chain, folder)
    for name, value in values(folder).items():
        linear, weight = model.get_submodule(name.removesuffix(".weight")), own.get_parameter(name)
        torch.testing.assert_close(linear.rounded().detach(), value, rtol=1e-3, atol=0)
        assert (linear.weight - weight).norm() < 0.7 * (value - weight).norm()


def test_where_norms_were_moved_it_begins_at_the_values(chain: Chain, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True, norms=1.5)
    model = begun(chain, folder)
    assert torch.equal(
        model.model.layers[0].input_layernorm.weight,
        1.5 * load_model(chain.model).model.layers[0].input_layernorm.weight,
    )
    for name, value in values(folder).items():
        torch.testing.assert_close(model.get_submodule(name.removesuffix(".weight")).weight.detach(), value)


def test_codes_and_zero_points_reach_the_bundle(chain: Chain, tmp_path: Path) -> None:
    """With weights that hardly move, what is deployed are the codes that were begun with."""
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    quiet = {"joint_student_lr": 1e-12, "finetune_student_lr": 1e-12, "weight_clip_lr": 0.0}
    student = chain.distilled(start_uri=str(folder), weight_zero_points=True, **quiet)
    latent = load(student.file("latent.safetensors"))
    assert latent[f"{LINEAR}.zero_OG"].dtype == torch.int8
    config = CalibrateConfig(student_uri=str(chain.model), check_traces=1)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(chain.folder, "calibrate", config, **parents)
    bundle = writer.commit(calibrate.run(config, **parents, bundle=writer))
    exported, began = load(bundle.file("model.safetensors")), load_file(folder / "model.safetensors")
    for name in (n for n in began if n.endswith((".weight_packed", ".weight_zero_point"))):
        assert torch.equal(exported[name], began[name]), name


def test_the_table_is_the_profiles(chain: Chain, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    assert find_start(folder, SCHEME).policy() is None
    student = chain.distilled(start_uri=str(folder), weight_zero_points=True, finetune_steps=1, joint_steps=0)
    assert "policy_table.bin" in {shard.name for shard in student.shards()}


REFUSED = {
    "symmetric": (Scheme(), "its groups have zero points; take distill.weight_zero_points=true"),
    "groups": (
        Scheme(zero_points=True, group_size=32),
        "16 words of codes in 2 groups, which are not the student's 4 bits",
    ),
    "bits": (Scheme(zero_points=True, weight_bits=8), "which are not the student's 8 bits in groups of 64"),
    "full": (Scheme(zero_points=True, exceptions=("up_proj=16",)), "up_proj: the student's is in full precision"),
    "ternary": (Scheme(zero_points=True, exceptions=("up_proj=ternary",)), "up_proj: the student's is ternary"),
    "turned": (Scheme(zero_points=True, activation="plain", rotation="hadamard"), "rotation 'hadamard'; take 'none'"),
}


@pytest.mark.parametrize("headers_alone", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_another_grid_is_refused_by_the_headers(chain: Chain, tmp_path: Path, case: str, headers_alone: bool) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    if headers_alone:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        weight_headers.write(lambda count: data[:count], len(data), file)
        find_start(folder, SCHEME, whole=False)
    scheme, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        find_start(folder, scheme, whole=False)


def test_a_checkpoint_of_another_model_is_refused(chain: Chain, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    tensors = load_file(folder / "model.safetensors")
    for change, message in (
        ({f"{LINEAR}.weight_packed": None}, rf"{LINEAR} of LlamaForCausalLM is rounded and not packed there"),
        ({"model.norm.weight": torch.full((64,), 2.0)}, r"model\.norm\.weight is not the student's"),
        ({"model.layers.7.bias": torch.zeros(3)}, r"layers\.7\.bias is no weight of LlamaForCausalLM"),
    ):
        left = {name: value for name, value in (tensors | change).items() if value is not None}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            begun(chain, folder)


def test_reordered_groups_are_refused(chain: Chain, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    tensors = load_file(folder / "model.safetensors") | {f"{LINEAR}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{LINEAR}: its groups are in another order \(weight_g_idx, actorder\)"):
        find_start(folder, SCHEME)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="quantised by 'awq'"):
        find_start(folder, SCHEME)


def test_adapters_stand_on_the_codes(chain: Chain, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", chain.model, zero_points=True)
    model = begun(chain, folder, lora_rank=2)
    linear = model.get_submodule(LINEAR)
    assert isinstance(linear, LowBitLinear)
    torch.testing.assert_close(linear.rounded().detach(), values(folder)[f"{LINEAR}.weight"], rtol=1e-3, atol=0)
