"""What a server computes of a bundle beside the weights, without a server: rounding, names, positions, refusals."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import write_tiny_bundle

from reflux.components.algorithms.low_bit import Scheme, site_modules, watching_sites
from reflux.components.bundles.bundle import load_bundle
from reflux.components.serve import served_bundle, vllm_plugin
from reflux.components.serve.served_bundle import read_served, require_possible, site_of, token_positions

SCHEMES: dict[str, dict[str, Any]] = {
    "dual": {},
    "plain": {"activation": "plain", "activation_bits": 8},
    "mixed": {"exceptions": ("down_*=8", "layers.0.mlp_in=16")},
}


@torch.no_grad()
def around_sites(folder: Path, input_BT: torch.Tensor, position_BT: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Site -> hidden states before and after its rounding, in the bundle's own forward."""
    model = load_bundle(folder)
    seen: dict[str, list[torch.Tensor]] = {}
    for site, module in site_modules(model).items():
        module.register_forward_pre_hook(
            lambda _, args, kwargs, site=site: seen[site].append(
                kwargs.get("hidden_states", args[0] if args else None)
            ),
            with_kwargs=True,
        )  # registered last, called last
    with watching_sites(model, lambda site, x_BTD: seen.setdefault(site, []).append(x_BTD)):
        model(input_BT, position_ids=position_BT)
    return seen


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_site_rounds_as_in_the_bundles_own_forward(scheme: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model, **SCHEMES[scheme])
    input_BT = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(0))
    position_BT = torch.arange(12) + torch.tensor([[0], [30]])
    served, rounds = read_served(folder), 0
    main_scale_SN = served.main_scales(position_BT.flatten())
    for site, (before_BTD, after_BTD) in around_sites(folder, input_BT, position_BT).items():
        if site not in served.bits:
            assert torch.equal(before_BTD, after_BTD), site
            continue
        rounded_ND = served.rounded(site, before_BTD.flatten(0, 1), main_scale_SN)
        assert torch.equal(rounded_ND, after_BTD.flatten(0, 1)), site
        assert not torch.equal(before_BTD, after_BTD), site
        rounds += 1
    assert rounds == (7 if scheme == "mixed" else 8)


def test_rounding_keeps_the_type_and_not_its_precision(tiny_model: Path, tmp_path: Path) -> None:
    served = read_served(write_tiny_bundle(tmp_path / "bundle", tiny_model, activation="plain", activation_bits=8))
    x_ND = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded_ND = served.rounded("layers.0.attn_in", x_ND, None)
    assert rounded_ND.dtype == torch.bfloat16
    step_N1 = x_ND.float().abs().amax(-1, keepdim=True) / 127
    assert torch.equal(rounded_ND, ((x_ND.float() / step_N1).round() * step_N1).bfloat16())


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("model.layers.3.self_attn.qkv_proj", "layers.3.attn_in"),
        ("model.layers.3.self_attn.k_proj", "layers.3.attn_in"),
        ("layers.12.self_attn.o_proj", "layers.12.o_in"),
        ("language_model.model.layers.0.mlp.gate_up_proj", "layers.0.mlp_in"),
        ("model.layers.0.mlp.down_proj", "layers.0.down_in"),
        ("lm_head", None),
        ("vision.blocks.1.mlp.down_proj", None),
    ],
)
def test_a_servers_name_leads_to_the_site(name: str, site: str | None) -> None:
    assert site_of(name) == site


def test_a_layer_that_no_site_feeds_is_named() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.block_sparse_moe\.gate: stands in no block"):
        site_of("model.layers.0.block_sparse_moe.gate")


@pytest.mark.parametrize("padding", [0, 3])
def test_positions_are_those_of_each_request(padding: int) -> None:
    """A prompt, a later part of one, one token behind a long answer, and a prompt of one token."""
    cached, new = [0, 4, 17, 0], [5, 3, 1, 1]
    start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist(), *[sum(new)] * padding], dtype=torch.int32)
    length = torch.tensor([c + n for c, n in zip(cached, new, strict=True)], dtype=torch.int32)
    expected = [c + i for c, n in zip(cached, new, strict=True) for i in range(n)]
    position_N = token_positions(start, length, sum(new) + padding)
    assert position_N.dtype == torch.int64
    assert position_N[: sum(new)].tolist() == expected
    assert len(position_N) == sum(new) + padding


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"enforce_eager": False}, "start vLLM with --enforce-eager"),
        ({"tensor_parallel": 2}, "--tensor-parallel-size 2: an outlier scale is of the whole token"),
        ({"rounds_again": True}, "VLLM_CPU_INT4_W4A8 1: .* set it to 0"),
    ],
)
def test_what_would_change_the_result_is_refused(setting: dict[str, Any], message: str) -> None:
    allowed = {"enforce_eager": True, "tensor_parallel": 1, "rounds_again": False}
    require_possible(**allowed)
    with pytest.raises(ValueError, match=message):
        require_possible(**allowed | setting)


def test_a_scheme_with_more_than_a_server_computes_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model, exceptions=("down_in=8",))
    assert read_served(folder).scheme == Scheme(exceptions=("down_in=8",))
    monkeypatch.setattr(served_bundle, "SERVED", served_bundle.SERVED - {"exceptions"})
    with pytest.raises(ValueError, match="its scheme has exceptions, which reflux does not compute in a server"):
        read_served(folder)
    monkeypatch.undo()
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"config\.json: its sha256 is not the one in quant_config\.json"):
        read_served(folder)


def test_a_bundle_brings_the_plugin_and_its_entry_point(tiny_model: Path, tmp_path: Path) -> None:
    """As vLLM looks for it, with runtime/ on the path; and the same where reflux is installed."""
    runtime = write_tiny_bundle(tmp_path / "bundle", tiny_model) / "runtime"
    (found,) = importlib.metadata.distributions(path=[str(runtime)])
    (entry,) = found.entry_points
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {entry.group: {entry.name: entry.value}}
    module, _, function = entry.value.partition(":")
    source = runtime / f"{module.replace('.', '/')}.py"
    assert f"def {function}() -> None:" in source.read_text()
    assert found.metadata["Name"] == "reflux-bundle"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this vLLM has what the plugin needs")
def test_a_vllm_that_lacks_something_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    vllm_plugin.register()
    assert "--quantization reflux is not known to this vLLM: No module named 'vllm'" in caplog.text
