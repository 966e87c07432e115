"""profile_kv: statistics against synthetic activations that are known, K norms and bytes against literal loops."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiny_chain
import torch
from safetensors.torch import load_file, save_file
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components import models
from reflux.components.algorithms.low_bit import SITES
from reflux.components.algorithms.policies import KNOTS, PositionTable
from reflux.components.bundles import policy_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.profile_kv import stage
from reflux.components.profile_kv.activations import ActivationWatch, activation_rows, position_table
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.profile_kv.layers import bimodal_share

HEADS, HEAD_WIDTH, LAYERS = 2, 16, 2  # of the tiny model's K and V
SITE = "layers.0.mlp_in"


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def sequences(chain: Chain) -> list[list[int]]:
    """What was profiled: training traces in order of trace_id."""
    rows = [row for row in chain.traces.table("traces").to_pylist() if row["split"] == "train"]
    rows.sort(key=lambda row: row["trace_id"])
    return [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]


def test_every_site_has_a_row_for_every_stretch_of_positions(chain: Chain, sequences: list[list[int]]) -> None:
    rows = chain.profile.table("activations").to_pylist()
    sites = [f"layers.{layer}.{site}" for layer in range(LAYERS) for site in SITES]
    assert list(dict.fromkeys(row["site"] for row in rows)) == sites
    longest = max(map(len, sequences))
    for site in sites:
        own = [row for row in rows if row["site"] == site]
        assert {row["layer"] for row in own} == {int(site.split(".")[1])}
        assert own[0]["position_from"] == 0
        assert own[-1]["position_from"] < longest <= own[-1]["position_to"]
        assert all(a["position_to"] == b["position_from"] for a, b in pairwise(own))
        for row in own:
            tokens = sum(max(0, min(len(ids), row["position_to"]) - row["position_from"]) for ids in sequences)
            assert row["tokens"] == tokens
            assert 0 <= row["outlier_share"] < 1
            assert 0 < row["rms"] <= row["absmax"]
            assert 0 < row["bimodality"] <= 1


def test_the_written_table_knows_every_site_and_repeats_its_last_seen_scale(chain: Chain) -> None:
    table = policy_table.decode(chain.profile.file("policy_table.bin"))
    scales_SP2 = table.scales()
    rows = chain.profile.table("activations").to_pylist()
    assert table.sites == list(dict.fromkeys(row["site"] for row in rows))
    for row in rows:
        knot = min(range(len(KNOTS)), key=lambda p: abs(KNOTS[p] - row["position_from"]))
        main = scales_SP2[table.index[row["site"]], knot, 0].item()
        assert 7 * main == pytest.approx(row["main_absmax"], rel=1e-5)
    assert torch.equal(scales_SP2[:, -1], scales_SP2[:, -2])  # far beyond the longest trace
    assert (scales_SP2 > 0).all()


def watched(x_BTD: torch.Tensor, mask_BT: torch.Tensor, sample_tokens: int = 10_000) -> ActivationWatch:
    watch = ActivationWatch(sample_tokens, len(x_BTD), seed=0)
    watch.begin(mask_BT)
    watch.see(SITE, x_BTD)
    return watch


def test_a_known_share_of_outliers_is_found() -> None:
    """Every 50th channel is 40 times larger: 2 % of the values, and the main grid is chosen to end among the rest."""
    generator = torch.Generator().manual_seed(0)
    x_BTD = 2 * torch.rand(4, 32, 100, generator=generator) - 1
    x_BTD[..., ::50] = 40 * x_BTD[..., ::50].sign()
    watch = watched(x_BTD, torch.ones(4, 32, dtype=torch.long))
    reaching_one = PositionTable([SITE], torch.full((1, len(KNOTS), 2), 1 / 7))
    for row in activation_rows(watch, reaching_one, bits=4):
        assert row["main_absmax"] == pytest.approx(1)
        assert row["outlier_share"] == pytest.approx(0.02)
        assert row["absmax"] == 40
    chosen_SP2 = position_table(watch, [SITE], bits=4).scales()
    assert (chosen_SP2[..., 0] < 1 / 7).all()
    torch.testing.assert_close(chosen_SP2[..., 1], torch.full((1, len(KNOTS)), 40 / 7))


def test_even_values_have_no_outliers() -> None:
    x_BTD = torch.ones(2, 8, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    watch = watched(x_BTD, torch.ones(2, 8, dtype=torch.long))
    rows = activation_rows(watch, position_table(watch, [SITE], bits=4), bits=4)
    assert [row["outlier_share"] for row in rows] == [0] * len(rows)
    assert {(row["rms"], row["absmax"], row["kurtosis"]) for row in rows} == {(1, 1, 1)}


def test_padding_is_not_seen_whatever_stands_in_it() -> None:
    generator = torch.Generator().manual_seed(1)
    x_BTD = torch.randn(3, 16, 32, generator=generator)
    mask_BT = torch.arange(16)[None] < torch.tensor([16, 3, 9])[:, None]
    poisoned_BTD = x_BTD.masked_fill(~mask_BT[..., None], float("nan"))
    rows = [
        activation_rows(watch, position_table(watch, [SITE], 4), 4)
        for watch in (watched(x_BTD, mask_BT.long()), watched(poisoned_BTD, mask_BT.long()))
    ]
    assert rows[0] == rows[1]
    assert sum(row["tokens"] for row in rows[0]) == 16 + 3 + 9


def test_a_small_sample_is_no_larger_than_asked_and_keeps_exact_extremes() -> None:
    x_BTD = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(2))
    watch = watched(x_BTD, torch.ones(4, 64, dtype=torch.long), sample_tokens=8)
    for (_, knot), seen in watch.statistics.items():
        assert len(seen.sample()) == min(8, seen.tokens), knot
    assert max(seen.absmax for seen in watch.statistics.values()) == x_BTD.abs().max().item()
    assert sum(seen.tokens for seen in watch.statistics.values()) == 4 * 64


def test_k_norms_are_those_of_a_loop_over_single_forwards(chain: Chain, sequences: list[list[int]]) -> None:
    model = models.load_model(chain.model)
    norms: dict[tuple[int, int], list[float]] = {}
    for ids in sequences:
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        for layer in range(LAYERS):
            for position in range(len(ids)):
                heads = [cache.layers[layer].keys[0, head, position].norm().item() for head in range(HEADS)]
                norms.setdefault((layer, position), []).append(sum(heads) / HEADS)
    rows = chain.profile.table("k_norms").to_pylist()
    assert {(row["layer"], row["position"]) for row in rows} == norms.keys()
    for row in rows:
        seen = torch.tensor(norms[row["layer"], row["position"]], dtype=torch.float64)
        assert row["sequences"] == len(seen)
        assert row["k_norm_mean"] == pytest.approx(seen.mean().item(), rel=1e-4)
        assert row["k_norm_std"] == pytest.approx(seen.std(correction=0).item(), abs=1e-3)


def test_bytes_are_keys_and_values_of_every_layer_up_to_the_token(chain: Chain) -> None:
    costs = chain.profile.table("kv_cost").to_pylist()
    assert len(costs) == 2  # cost_traces 1, cost_tokens 2
    for row in costs:
        held = row["position"] + 1  # the token's own K and V are there when it attends
        assert row["kv_bytes"] == held * LAYERS * 2 * HEADS * HEAD_WIDTH * 4
        assert row["update_us"] > 0
    lengths = {r["trace_id"]: len(r["prompt_token_ids"]) for r in chain.traces.table("traces").to_pylist()}
    assert costs[0]["position"] == lengths[costs[0]["trace_id"]]


@pytest.mark.parametrize("layer", [0, 1])
def test_activations_that_are_not_finite_are_named_with_trace_and_position(
    chain: Chain, tmp_path: Path, layer: int
) -> None:
    """A norm that turns one channel of every token into infinity, in the first layer and in the last."""
    student = Path(shutil.copytree(chain.model, tmp_path / "student"))
    weights = load_file(student / "model.safetensors")
    weights[f"model.layers.{layer}.post_attention_layernorm.weight"][3] = torch.inf
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    trace_ids = [row["trace_id"] for row in chain.traces.table("traces").to_pylist() if row["split"] == "train"]
    module = rf"model\.layers\.{layer}\.post_attention_layernorm"
    with pytest.raises(
        ValueError, match=rf"profile_kv: the output of {module} is not .* position 0 of trace {min(trace_ids)}"
    ):
        profiled(replace(chain, model=student), tmp_path)


def test_traces_of_which_none_is_for_training_are_refused(chain: Chain, tmp_path: Path) -> None:
    table = chain.traces.table("traces")
    rows = [row | {"split": "heldout"} for row in table.to_pylist()]
    config = CollectTracesConfig(teacher=str(chain.model), prompts_uri=str(chain.folder / "prompts.jsonl"))
    writer = writer_for(tmp_path, "collect_traces", config)
    writer.write_table("traces/00000", pa.Table.from_pylist(rows, schema=table.schema), table.schema)
    with pytest.raises(ValueError, match="profile_kv: the traces hold no training trace"):
        profiled(replace(chain, traces=writer.commit({})), tmp_path)


def test_the_share_of_the_templates_tokens_is_told(chain: Chain) -> None:
    assert 0 < chain.profile.metrics["template_share"] < 1
    prompt = {"prompt_token_ids": [1, 5, 6, 7, 2], "response_token_ids": [9, 9, 9]}
    other = {"prompt_token_ids": [1, 5, 8, 8, 8, 7, 2], "response_token_ids": [9]}
    assert stage.template_share([prompt, other, prompt]) == 3 * (2 + 2) / (8 + 8 + 8)
    assert stage.template_share([prompt, prompt]) == 0
    within = {"prompt_token_ids": [1, 5, 7, 2], "response_token_ids": []}
    assert stage.template_share([prompt, within]) == 2 * 4 / (8 + 4)


def profiled(chain: Chain, folder: Path, **options: Any) -> Any:
    config = ProfileKvConfig(student_uri=str(chain.model), cost_traces=1, cost_tokens=2, **options)
    writer = writer_for(folder, "profile_kv", config, traces=chain.traces)
    return writer.commit(stage.run(config, traces=chain.traces, profile=writer))


def test_equal_work_gives_an_equal_digest_apart_from_what_was_timed(chain: Chain, tmp_path: Path) -> None:
    again = profiled(chain, tmp_path)
    assert again.digest == chain.profile.digest
    first, second = (
        {shard.name: (shard.sha256, shard.measured) for shard in artifact.shards()}
        for artifact in (chain.profile, again)
    )
    measured = {name for name, (_, is_measured) in second.items() if is_measured}
    timed = {"kv_cost", "kv_cost_buckets", "profiler_overhead", "power", "power_windows", "power_coefficients"}
    assert {name for name in measured if not name.startswith("plots/")} == {*timed, "profile.html"}
    assert {name for name in first if first[name] != second[name]} <= measured


def test_what_is_longer_than_asked_is_not_profiled(chain: Chain, tmp_path: Path) -> None:
    short = profiled(chain, tmp_path, profiled_traces=3, max_sequence_tokens=10)
    assert {row["sequences"] for row in short.table("k_norms").to_pylist()} == {3}
    assert max(row["position"] for row in short.table("k_norms").to_pylist()) == 9
    assert sum(row["tokens"] for row in short.table("activations").to_pylist()) == 3 * 10 * LAYERS * len(SITES)


def test_a_layer_says_what_its_sites_and_keys_say(chain: Chain) -> None:
    activations = chain.profile.table("activations").to_pylist()
    keys = chain.profile.table("k_norms").to_pylist()
    layers = chain.profile.table("layers").to_pylist()
    assert [row["layer"] for row in layers] == list(range(LAYERS))
    for row in layers:
        own = [each for each in activations if each["layer"] == row["layer"]]
        tokens = np.array([each["tokens"] for each in own])
        assert row["absmax"] == max(each["absmax"] for each in own)
        for name in ("outlier_share", "kurtosis", "bimodality"):
            assert row[name] == pytest.approx(np.average([each[name] for each in own], weights=tokens), rel=1e-5)
        norm_outputs = np.array([each["site"].endswith(("attn_in", "mlp_in")) for each in own])
        two_modes = np.array([each["bimodality"] > 5 / 9 for each in own])
        share = tokens[norm_outputs & two_modes].sum() / tokens[norm_outputs].sum()
        assert row["bimodal_share"] == pytest.approx(share)
        of_layer = [each for each in keys if each["layer"] == row["layer"]]
        mean = np.average([each["k_norm_mean"] for each in of_layer], weights=[e["sequences"] for e in of_layer])
        assert row["k_norm_mean"] == pytest.approx(mean, rel=1e-5)
    assert chain.profile.metrics["bimodal_norm_share"] == pytest.approx(
        np.mean([row["bimodal_share"] for row in layers])
    )


def test_layers_with_two_modes_are_told_from_those_with_one() -> None:
    """Half of the channels near 0.01 and half near 1: two modes of log |x|; all near 1: one."""
    noise_BTD = 1 + 0.1 * torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(3))
    ones = torch.ones(4, 32, dtype=torch.long)
    share = {}
    for name, x_BTD in {"one": noise_BTD, "two": noise_BTD * torch.tensor([0.01, 1.0]).repeat(32)}.items():
        watch = watched(x_BTD, ones)
        share[name] = bimodal_share(activation_rows(watch, position_table(watch, [SITE], bits=4), bits=4))
    assert share == {"one": 0, "two": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiled_traces": 0}, "profiled_traces 0: must be at least 1"),
        ({"cost_tokens": -1}, "cost_tokens -1: must not be negative"),
        ({"activation_bits": 16}, "activation_bits 16: must be 2 to 8"),
        ({"cost_rounds": 0}, "cost_rounds 0: must be at least 1"),
        ({"cost_device": "tpu"}, "cost_device 'tpu': allowed are cpu, cuda"),
        ({"power_profile": "legal"}, "power_profile 'legal': allowed are general, medical, code, edge"),
        ({"power_coefficients": [0.5, 0.6, -0.1]}, r"power_coefficients \[0.5, 0.6, -0.1\]: must be three numbers"),
        ({"power_coefficients": [0.5, 0.4]}, r"power_coefficients \[0.5, 0.4\]: must be three numbers"),
        ({"power_attention_layers": [-1]}, r"power_attention_layers \[-1\]: must not be negative"),
    ],
)
def test_a_bad_configuration_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"profile_kv.{message}"):
        ProfileKvConfig(**options)
