"""A bundle through `from_pretrained`: the imitated forward to the bit, the deployed one beside it, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_bundle import write_tiny_bundle
from tiny_model import save_untied
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.cpu_kernels import CodedLinear, Int4Linear, IntegerLinear
from reflux.components.algorithms.low_bit import full_precision_activations
from reflux.components.bundles.bundle import load_bundle
from reflux.components.bundles.packed_linear import unpack
from reflux.components.bundles.transformers_bundle import low_bit_config, require_kernels
from reflux.components.models import load_model

SCHEMES: dict[str, dict[str, Any]] = {
    "w4a4_dual": {},
    "w4a8_plain": {"activation_bits": 8, "activation": "plain"},
    "w8a8_dual": {"weight_bits": 8, "activation_bits": 8},
    "w4a16": {"activation_bits": 16},
    "mixed": {"exceptions": ("down_*=8", "layers.0.mlp_in=16", "v_proj=3")},
    "w4a4_dual_zero_points": {"zero_points": True},
    "w8a8_plain_zero_points": {"weight_bits": 8, "activation_bits": 8, "activation": "plain", "zero_points": True},
    "w4a16_zero_points": {"activation_bits": 16, "zero_points": True},
    "mixed_zero_points": {"zero_points": True, "exceptions": ("down_*=8", "v_proj=3", "q_proj=ternary")},
    "w4a4_dual_embedding8": {"embedding_bits": 8},
    "w4a16_embedding8": {"activation_bits": 16, "embedding_bits": 8},
    "w2.79a8": {"activation_bits": 8, "activation": "plain", "exceptions": ("layers.*[02468].*_proj=ternary",)},
}


@pytest.fixture(scope="module")
def bundles(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {name: write_tiny_bundle(folder / name, tiny_model, **options) for name, options in SCHEMES.items()}


def from_pretrained(folder: Path, forward: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=low_bit_config(folder, forward), dtype=dtype)


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    logits = model(ids, position_ids=torch.arange(20).expand(2, -1)).logits
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_pretrained_gives_the_bundles_forward(bundles: dict[str, Path], scheme: str) -> None:
    model = from_pretrained(bundles[scheme], "simulated")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(logprobs(model), logprobs(load_bundle(bundles[scheme])))


INTEGER = [
    name for name, options in SCHEMES.items() if options.get("activation_bits", 4) < 16 and not name.startswith("w2")
]


@pytest.mark.parametrize("scheme", INTEGER)
def test_the_deployed_forward_is_the_imitated_one_in_integers(bundles: dict[str, Path], scheme: str) -> None:
    deployed, imitated = from_pretrained(bundles[scheme], "deployed"), load_bundle(bundles[scheme])
    assert sum(isinstance(m, IntegerLinear) for m in deployed.modules()) == 2 * 7
    # one value on the edge between two codes moves those of the layers after it; products are equal by themselves
    assert (logprobs(deployed) - logprobs(imitated)).abs().mean() < 5e-3
    with full_precision_activations(deployed), full_precision_activations(imitated):
        torch.testing.assert_close(logprobs(deployed), logprobs(imitated), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("scheme", "of_four_bits"),
    [("w4a4_dual", 14), ("w4a4_dual_zero_points", 14), ("mixed_zero_points", 12), ("w4a4_dual_embedding8", 14),
     ("w8a8_dual", 0)],
)  # fmt: skip
def test_in_bfloat16_weights_of_four_bits_stay_so(bundles: dict[str, Path], scheme: str, of_four_bits: int) -> None:
    deployed, imitated = from_pretrained(bundles[scheme], "deployed", torch.bfloat16), load_bundle(bundles[scheme])
    kinds = [type(module) for module in deployed.modules() if isinstance(module, CodedLinear)]
    assert (kinds.count(Int4Linear), kinds.count(IntegerLinear)) == (of_four_bits, 14 - of_four_bits)
    with full_precision_activations(deployed), full_precision_activations(imitated):
        assert (logprobs(deployed) - logprobs(imitated)).abs().mean() < 0.02
    # bfloat16 moves values over the edge between two codes, in this forward no more than in the imitated one
    exact, moved = logprobs(imitated), logprobs(imitated.to(torch.bfloat16))
    assert (logprobs(deployed) - exact).abs().mean() < 1.2 * (moved - exact).abs().mean()


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16_zero_points", "w4a16_embedding8"])
def test_four_bit_weights_alone_are_deployed_as_four_bits(bundles: dict[str, Path], scheme: str) -> None:
    imitated = logprobs(load_bundle(bundles[scheme]))
    exact = from_pretrained(bundles[scheme], "deployed")
    assert sum(isinstance(m, Int4Linear) for m in exact.modules()) == 2 * 7
    torch.testing.assert_close(logprobs(exact), imitated, rtol=0, atol=1e-4)
    short = from_pretrained(bundles[scheme], "deployed", torch.bfloat16)
    assert short.model.rotary_emb.inv_freq.dtype == torch.float32
    assert (logprobs(short) - imitated).abs().mean() < 0.02


@pytest.mark.parametrize("forward", ["simulated", "deployed"])
def test_it_answers_by_itself(bundles: dict[str, Path], forward: str) -> None:
    model = from_pretrained(bundles["w4a4_dual"], forward)
    asked = torch.tensor([[1, 40, 50, 60]])
    settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(asked)}
    assert torch.equal(model.generate(asked, **settings), load_bundle(bundles["w4a4_dual"]).generate(asked, **settings))


def test_another_forward_and_no_bundle_are_refused(bundles: dict[str, Path], tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"forward 'fast': allowed are \('simulated', 'deployed'\)"):
        low_bit_config(bundles["w4a4_dual"], "fast")
    with pytest.raises(ValueError, match=r"is no bundle, it has no quant_config\.json"):
        low_bit_config(tiny_model)


def test_zero_points_are_told_in_every_file(bundles: dict[str, Path]) -> None:
    folder = bundles["mixed_zero_points"]
    described = json.loads((folder / "quant_config.json").read_text())
    assert described["scheme"]["zero_points"] is True
    stored = load_file(folder / "model.safetensors")
    for name, entry in described["weights"].items():
        told = 0 if name.endswith("q_proj") else f"{name}.weight_zero_point"
        assert entry["zero_point"] == told
        assert (f"{name}.weight_zero_point" in stored) == (told != 0)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    kinds = {(group["weights"]["num_bits"], group["weights"]["symmetric"]): group["targets"] for group in groups}
    assert {kind: len(targets) for kind, targets in kinds.items()} == {
        (4, False): 1, (8, False): 2, (3, False): 2, (2, True): 2,
    }  # fmt: skip
    assert kinds[4, False] == ["Linear"]
    assert "4 bits, zero points, groups of 64" in (folder / "README.md").read_text()


def test_a_head_of_its_own_travels_and_a_tied_one_is_not_stored(tiny_model: Path, tmp_path: Path) -> None:
    base = save_untied(tmp_path / "base", tiny_model)
    folder = write_tiny_bundle(tmp_path / "bundle", base, zero_points=True)
    assert torch.equal(load_bundle(folder).lm_head.weight, load_model(base).lm_head.weight)
    assert torch.equal(logprobs(from_pretrained(folder, "simulated")), logprobs(load_bundle(folder)))
    tied = load_file(write_tiny_bundle(tmp_path / "tied", tiny_model) / "model.safetensors")
    assert "lm_head.weight" not in tied


def test_a_packed_layer_that_is_not_described_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model)
    config = json.loads((folder / "quant_config.json").read_text())
    del config["weights"]["model.layers.1.mlp.up_proj"]
    (folder / "quant_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj is packed in .* and not described"):
        load_bundle(folder)


def test_full_precision_weights_have_nothing_to_deploy(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model, weight_bits=16, activation="plain")
    assert logprobs(from_pretrained(folder, "simulated")).isfinite().all()
    with pytest.raises(ValueError, match="its weights are in full precision"):
        from_pretrained(folder, "deployed")


def test_a_full_precision_weight_behind_rounded_activations_has_no_integer_product(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = {"exceptions": ("o_proj=16", "layers.0.o_in=16")}
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model, **options)
    assert torch.equal(logprobs(from_pretrained(folder, "simulated")), logprobs(load_bundle(folder)))
    message = r"model\.layers\.1\.self_attn\.o_proj has its weight in full precision"
    with pytest.raises(ValueError, match=message):
        require_kernels(folder)  # so that evaluate knows it before its first row
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder, "deployed")


@torch.no_grad()
def test_ternary_layers_run_on_integers_too(bundles: dict[str, Path]) -> None:
    deployed, imitated = from_pretrained(bundles["w2.79a8"], "deployed"), load_bundle(bundles["w2.79a8"])
    for name, linear in deployed.named_modules():
        if isinstance(linear, IntegerLinear):
            assert torch.equal(linear.weight, imitated.get_submodule(name).weight)
    # sums in another order: a value beside the middle of two codes crosses it here, and a row of logits moves
    assert (logprobs(deployed) - logprobs(imitated)).abs().mean() < 5e-3


def test_ternary_codes_lie_as_two_bits_and_say_so(bundles: dict[str, Path]) -> None:
    described = json.loads((bundles["w2.79a8"] / "quant_config.json").read_text())["weights"]
    ternary = {name for name, entry in described.items() if entry["codes"] == "ternary"}
    assert ternary == {name for name in described if name.startswith("model.layers.0.")}
    assert {described[name]["bits"] for name in ternary} == {2}
    stored = load_file(bundles["w2.79a8"] / "model.safetensors")
    for name in ternary:
        rows, columns = stored[f"{name}.weight_shape"].tolist()
        assert stored[f"{name}.weight_packed"].shape == (rows, columns * 2 // 32)
        assert unpack(stored[f"{name}.weight_packed"], 2, columns).unique().tolist() == [-1, 0, 1]
    groups = json.loads((bundles["w2.79a8"] / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["num_bits"]: len(group["targets"]) for group in groups.values()} == {4: 1, 2: 7}
