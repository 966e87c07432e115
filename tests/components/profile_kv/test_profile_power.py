"""Compute power in the stage: features against single forwards, coefficients by measurement or by configuration."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components import models
from reflux.components.algorithms.power import power_distribution
from reflux.components.artifacts import Artifact
from reflux.components.profile_kv import config as profile_config
from reflux.components.profile_kv import stage
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.profile_kv.power_choice import PowerData, choose
from reflux.components.profile_kv.power_profiles import (
    PROFILES,
    TOKEN_CLASSES,
    token_classes,
    token_coefficients,
    token_groups,
)


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


def profiled(chain: Chain, folder: Path, **options: Any) -> Artifact:
    small = {"profiled_traces": 4, "cost_traces": 2, "cost_tokens": 6, "cost_rounds": 2}
    config = ProfileKvConfig(student_uri=str(chain.model), **small | options)
    writer = writer_for(folder, "profile_kv", config, traces=chain.traces)
    return writer.commit(stage.run(config, traces=chain.traces, profile=writer))


@pytest.fixture(scope="module")
def profile(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return profiled(chain, tmp_path_factory.mktemp("profile"))


def rows_by_trace(artifact: Artifact, table: str) -> dict[str, dict[str, Any]]:
    return {row["trace_id"]: row for row in artifact.table(table).to_pylist()}


def test_features_are_those_of_single_forwards(chain: Chain, profile: Artifact) -> None:
    """Attention from the eager map of one unpadded sequence, the FFN from its outputs."""
    model = models.load_model(chain.model)
    model.set_attn_implementation("eager")
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, _args, output: outputs.append(output[0]))
    traces = rows_by_trace(chain.traces, "traces")
    for trace_id, row in rows_by_trace(profile, "power_features").items():
        outputs.clear()
        token_ids = traces[trace_id]["prompt_token_ids"] + traces[trace_id]["response_token_ids"]
        with torch.no_grad():
            maps = model(torch.tensor([token_ids]), output_attentions=True).attentions
        attention_N = torch.stack([map_BHNN[0].amax(-1).mean(0) for map_BHNN in maps]).mean(0)
        norm_N = torch.stack(outputs).norm(dim=-1).mean(0)
        torch.testing.assert_close(torch.tensor(row["attention"]), attention_N, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(row["ffn_norm"]), norm_N, rtol=1e-4, atol=1e-5)


def test_p_is_the_chosen_mixture_of_the_tables(chain: Chain, profile: Artifact) -> None:
    """From the written tables alone P can be made again: features, costs and the chosen row."""
    (chosen,) = (row for row in profile.table("power_coefficients").to_pylist() if row["chosen"])
    assert chosen["on_front"]
    features, costs = rows_by_trace(profile, "power_features"), rows_by_trace(profile, "kv_cost")
    powers = rows_by_trace(profile, "power")
    assert powers.keys() == features.keys()
    assert len(powers) == 4
    assert sum(any(row["cost_measured"]) for row in powers.values()) == 2 == len(costs)
    for trace_id, row in powers.items():
        own = features[trace_id]
        assert sum(row["power"]) == pytest.approx(1)
        assert row["power"][:4] == [0] * 4
        mask = torch.arange(len(row["power"])) >= 4
        made_again = power_distribution(
            torch.tensor([own["attention"], own["ffn_norm"], row["cost_us"]]).T[None],
            mask[None],
            torch.tensor([chosen[name] for name in ("alpha", "beta", "gamma")]),
        )[0]
        torch.testing.assert_close(torch.tensor(row["power"]).double(), made_again, rtol=1e-3, atol=1e-6)
    for row in profile.table("kv_cost").to_pylist():
        told = powers[row["trace_id"]]
        assert told["cost_measured"][row["position"]]
        assert told["cost_us"][row["position"]] == pytest.approx(row["update_us"] + row["read_us"], rel=1e-3)


def test_windows_cover_what_counts(profile: Artifact) -> None:
    windows = profile.table("power_windows").to_pylist()
    for trace_id, row in rows_by_trace(profile, "power").items():
        own = [window for window in windows if window["trace_id"] == trace_id]
        assert [window["position_from"] for window in own] == list(range(4, len(row["power"]), 32))
        assert sum(window["tokens"] for window in own) == len(row["power"]) - 4
        for window in own:
            assert 0 <= window["entropy_nats"] <= torch.tensor(float(window["tokens"])).log() + 1e-6
    full = [window["entropy_nats"] for window in windows if window["tokens"] == 32]
    assert profile.metrics["power_window_entropy_nats"] == pytest.approx(sum(full) / len(full), rel=1e-5)


def test_coefficients_of_the_configuration_are_taken_and_compared(chain: Chain, tmp_path: Path) -> None:
    given = [0.25, 0.5, 0.25]  # not on the grid
    artifact = profiled(chain, tmp_path, power_coefficients=given, power_profile="edge")
    rows = artifact.table("power_coefficients").to_pylist()
    assert len(rows) == 67
    assert [[row["alpha"], row["beta"], row["gamma"]] for row in rows if row["chosen"]] == [given]
    notes = artifact.schema_metadata("power_coefficients")
    assert (notes["chosen_by"], notes["power_profile"], notes["target_entropy_nats"]) == (
        "configuration",
        "edge",
        "1.5",
    )


def test_nothing_timed_is_no_power_but_all_the_rest(chain: Chain, tmp_path: Path) -> None:
    artifact = profiled(chain, tmp_path, cost_traces=0)
    for table in ("kv_cost", "kv_cost_buckets", "profiler_overhead", "power", "power_windows", "power_coefficients"):
        assert artifact.table(table).num_rows == 0
    assert artifact.table("power_features").num_rows == 4
    assert {shard.name for shard in artifact.shards("plots")} == {"plots/activations.svg", "plots/k_norms.svg"}
    assert not [name for name in artifact.metrics if name.startswith(("power_", "profiler_", "kv_"))]


def test_only_the_chosen_layers_attention_counts(chain: Chain, profile: Artifact, tmp_path: Path) -> None:
    last = profiled(chain, tmp_path, power_attention_layers=[1], cost_traces=0)
    both, one = (rows_by_trace(artifact, "power_features") for artifact in (profile, last))
    assert all(both[trace]["ffn_norm"] == one[trace]["ffn_norm"] for trace in both)
    assert all(both[trace]["attention"] != one[trace]["attention"] for trace in both)
    with pytest.raises(ValueError, match=r"power_attention_layers \[2\]: the student has layers 0 to 1"):
        profiled(chain, tmp_path / "beyond", power_attention_layers=[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named_before_any_work(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cost_device cuda: there is no GPU that torch can use here"):
        profiled(chain, tmp_path, cost_device="cuda")


def power_data(latency_of: int, importance_of: int) -> PowerData:
    """Three random features; latency and importance each follow one of them exactly."""
    steps_BNF = torch.randn(6, 40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features_BNF = steps_BNF.cumsum(1)  # walks, whose order a moving average keeps
    return PowerData(
        features_BNF=features_BNF,
        mask_BN=torch.ones(6, 40, dtype=torch.bool),
        class_BN=torch.zeros(6, 40, dtype=torch.long),
        latency_us_BN=features_BNF[..., latency_of],
        importance_BN=features_BNF[..., importance_of],
    )


def test_what_explains_both_aims_is_chosen_alone() -> None:
    (chosen,) = (each for each in choose(power_data(1, 1), PROFILES["general"], []) if each.chosen)
    assert chosen.coefficients == (0, 1, 0)
    assert chosen.latency_correlation == chosen.importance_correlation > 0.8


def test_between_two_aims_the_knee_gives_both_their_part() -> None:
    candidates = choose(power_data(2, 0), PROFILES["general"], [])
    (chosen,) = (each for each in candidates if each.chosen)
    assert chosen.on_front
    assert chosen.coefficients[0] > 0
    assert chosen.coefficients[2] > 0
    ends = {each.coefficients: each for each in candidates}
    assert ends[0.0, 0.0, 1.0].latency_correlation > chosen.latency_correlation
    assert ends[1.0, 0.0, 0.0].importance_correlation > chosen.importance_correlation


def test_the_configuration_and_the_data_name_the_same_profiles() -> None:
    assert tuple(PROFILES) == profile_config.POWER_PROFILES
    for profile in PROFILES.values():
        assert {*profile.least_alpha, *profile.apart} <= {*TOKEN_CLASSES}


def test_token_classes_of_a_program() -> None:
    texts = ["def", " f", "(", "x", "):", "\n", "    ", " return", " x", " +", " 1", "\n\n", "  ", " ", "é", "\ufffd"]
    names = [TOKEN_CLASSES[index] for index in token_classes(texts, [(3, 4)])]
    assert names == [
        "syntax", "other", "syntax", "anchor", "syntax", "indentation", "indentation", "syntax", "other", "syntax",
        "other", "indentation", "indentation", "indentation", "other", "other",
    ]  # fmt: skip
    assert TOKEN_CLASSES[token_classes(["a", " ", "b"], [])[1]] == "other"  # a space within a line


def test_a_medical_span_gets_more_of_attention_and_the_rest_in_proportion() -> None:
    class_BN = torch.tensor([[TOKEN_CLASSES.index("other"), TOKEN_CLASSES.index("anchor")]])
    other, anchor = token_coefficients((0.2, 0.6, 0.2), class_BN, PROFILES["medical"])[0].tolist()
    assert other == pytest.approx([0.2, 0.6, 0.2])
    assert anchor == pytest.approx([0.7, 0.225, 0.075])
    for name in ("general", "code", "edge"):
        assert token_coefficients((0.2, 0.6, 0.2), class_BN, PROFILES[name])[0, 1].tolist() == pytest.approx(
            [0.2, 0.6, 0.2]
        )
    assert token_coefficients((0.8, 0.1, 0.1), class_BN, PROFILES["medical"])[0, 1].tolist() == pytest.approx(
        [0.8, 0.1, 0.1]
    )


def test_a_program_is_scaled_by_kind_of_token() -> None:
    class_BN = torch.arange(len(TOKEN_CLASSES))[None]
    groups = {name: token_groups(class_BN, profile)[0].tolist() for name, profile in PROFILES.items()}
    assert groups == {"general": [0] * 4, "medical": [0] * 4, "edge": [0] * 4, "code": [0, 0, 2, 3]}


def test_the_page_shows_every_plot_and_loads_nothing(profile: Artifact) -> None:
    page = profile.file("profile.html").decode()
    assert page.count("<svg") == 5
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "data:" not in page
    names = {shard.name for shard in profile.shards("plots")}
    assert names == {f"plots/{name}.svg" for name in ("activations", "k_norms", "cost", "front", "power")}
    for name in names:
        drawing = ET.fromstring(profile.file(name))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(drawing.iter())) > 20
