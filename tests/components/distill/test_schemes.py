"""Each scheme goes its whole way on the tiny model: distilled, calibrated, evaluated, and known by its bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from safetensors.torch import load_file, save_file
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components.bundles.bundle import compressed_tensors_config, load_bundle, read_quant_config, read_scheme
from reflux.components.bundles.policy_table import decode
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.evaluate import stage as evaluate
from reflux.components.evaluate.config import EvaluateConfig

# fmt: off
SCHEMES: dict[str, dict[str, Any]] = {
    "w4a4": {},
    "w4a8": {"activation_bits": 8},
    "w8a8": {"weight_bits": 8, "activation_bits": 8, "activation": "plain"},
    "w2.79a8": {"activation_bits": 8, "exceptions": ["layers.*[02468].*_proj=ternary"]},
    "w4a16": {"activation_bits": 16},
    "w4a4 with a cache of 2 bits": {"kv_cache": "kivi2", "rope_bits": 8},
    "w4a4 turned": {"activation": "plain", "rotation": "hadamard", "kv_cache": "int4"},
    "w4a4 with zero points": {"weight_zero_points": True},
    "w4a8 with zero points": {"activation_bits": 8, "weight_zero_points": True},
    "w8a8 with zero points": {
        "weight_bits": 8, "activation_bits": 8, "activation": "plain", "weight_zero_points": True,
    },
    "w4a16 with zero points": {"activation_bits": 16, "weight_zero_points": True},
    "w4a4 with an embedding of 8 bits": {"embedding_bits": 8},
    "w4a4 turned, with an embedding and a head of 8 bits": {
        "activation": "plain", "rotation": "hadamard", "embedding_bits": 8,
    },
    "w4a4 down at 8": {"exceptions": ["down_proj=8", "down_in=8", "layers.1.*.q_proj=16"]},
}
# fmt: on
EQUALIZED = "w4a4 with equalised channels"
SMALL = {"windows": 2, "window_tokens": 80, "generations": 1, "generation_tokens": 2, "latency_tokens": 20}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEMES, EQUALIZED])
def test_a_scheme_goes_its_whole_way(name: str, chain: Chain, tmp_path: Path) -> None:
    options = SCHEMES.get(name, {})
    if name == EQUALIZED:
        chain = tiny_chain.make(tmp_path, chain.model, equalization_power=0.5)
    student = chain.distilled(max_steps=2, on_policy_fraction=0.0, group_size=32, **options)
    model = str(chain.model)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    freezing = CalibrateConfig(student_uri=model, check_traces=2)
    writer = writer_for(tmp_path, "calibrate", freezing, **parents)
    bundle = writer.commit(calibrate.run(freezing, **parents, bundle=writer))
    judging = EvaluateConfig(teacher=model, student_uri=model, **SMALL)
    writer = writer_for(tmp_path, "evaluate", judging, bundle=bundle, **parents)
    scores = writer.commit(evaluate.run(judging, bundle=bundle, **parents, scores=writer))

    bits = (options.get("weight_bits", 4), options.get("activation_bits", 4))
    rows = {row["role"]: row for row in json.loads(scores.file("metrics.json"))["table"]}
    assert rows["distilled"]["scheme"] == f"w{bits[0]}a{bits[1]}_distilled"
    assert rows["distilled"]["quantizer_digest"] == rows["undistilled"]["quantizer_digest"]
    assert (rows["distilled"]["kv_cache_bytes"] < rows["full"]["kv_cache_bytes"]) == ("kv_cache" in options)
    bundle.download_all("", tmp_path / "bundle")
    scheme = read_scheme(tmp_path / "bundle")
    assert scheme.exceptions == tuple(options.get("exceptions", []))
    assert scheme.zero_points == options.get("weight_zero_points", False)
    costs = scheme.weight_bits + (16 + scheme.weight_bits * scheme.zero_points) / 32
    if not scheme.exceptions:
        assert {rows[role]["effective_bits"] for role in ("undistilled", "distilled")} == {costs}
    assert rows["distilled"]["quantizer_digest"] == scheme.digest()
    assert (load_bundle(tmp_path / "bundle").policy is not None) == scheme.needs_policy


def test_exceptions_arrive_in_every_file_of_a_bundle(chain: Chain, tmp_path: Path) -> None:
    exceptions = SCHEMES["w4a4 down at 8"]["exceptions"]
    student = chain.distilled(warmup_steps=0, max_steps=1, on_policy_fraction=0.0, exceptions=exceptions)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    config = CalibrateConfig(student_uri=str(chain.model), check_traces=2)
    writer = writer_for(tmp_path, "calibrate", config, **parents)
    writer.commit(calibrate.run(config, **parents, bundle=writer)).download_all("", tmp_path / "bundle")

    described = read_quant_config(tmp_path / "bundle")
    assert "model.layers.1.self_attn.q_proj" not in described["weights"]
    assert {name: entry["bits"] for name, entry in described["weights"].items() if entry["bits"] != 4} == {
        "model.layers.0.mlp.down_proj": 8, "model.layers.1.mlp.down_proj": 8,
    }  # fmt: skip
    assert {site: entry["bits"] for site, entry in described["activations"].items() if entry["bits"] != 4} == {
        "layers.0.down_in": 8, "layers.1.down_in": 8,
    }  # fmt: skip
    said = json.loads((tmp_path / "bundle" / "config.json").read_text())["quantization_config"]
    assert said == compressed_tensors_config(load_bundle(tmp_path / "bundle"), read_scheme(tmp_path / "bundle"))
    assert said["ignore"] == ["lm_head", "model.layers.1.self_attn.q_proj"]
    groups = said["config_groups"]
    assert (groups["group_0"]["targets"], groups["group_0"]["weights"]["num_bits"]) == (["Linear"], 4)
    eight = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert (groups["group_1"]["targets"], groups["group_1"]["weights"]["num_bits"]) == (eight, 8)

    profiled, learned = decode(chain.profile.file("policy_table.bin")), decode(student.file("policy_table.bin"))
    ratio_SP = learned.scales()[..., 0] / profiled.scales()[..., 0]
    for site, at in profiled.index.items():  # one step moves scales by less than a hundredth
        assert ratio_SP[at].mean() == pytest.approx(7 / 127 if site.endswith("down_in") else 1, rel=0.02)


@pytest.mark.slow
def test_dead_channels_go_the_whole_way_as_zeros(tiny_model: Path, tmp_path: Path) -> None:
    """An FFN that gives nothing: weights, activations and thresholds of its sites are zero, and no scale is."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].zero_()
    weights["model.layers.1.self_attn.v_proj.weight"][:16] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    chain = tiny_chain.make(tmp_path, model)
    student = chain.distilled(
        warmup_steps=1, joint_steps=0, finetune_steps=0, on_policy_fraction=0.0, exceptions=["layers.*.down_in=8"]
    )
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    config = CalibrateConfig(student_uri=str(model), check_traces=2)
    writer = writer_for(tmp_path, "calibrate", config, **parents)
    writer.commit(calibrate.run(config, **parents, bundle=writer)).download_all("", tmp_path / "bundle")

    assert read_quant_config(tmp_path / "bundle")["activations"]["layers.0.down_in"]["outlier_threshold"] == 0
    assert (decode((tmp_path / "bundle" / "policy_table.bin").read_bytes()).scales() > 0).all()
    bundle = load_bundle(tmp_path / "bundle")
    assert not bundle.model.layers[0].mlp.up_proj.weight.any()
    assert not bundle.model.layers[1].self_attn.v_proj.weight[:16].any()
    with torch.no_grad():
        ids = torch.arange(3, 40)[None]
        assert bundle(ids, position_ids=torch.arange(37)[None]).logits.isfinite().all()
