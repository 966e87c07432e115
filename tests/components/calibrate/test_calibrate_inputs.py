"""What calibrate refuses, by name: students that cannot be frozen, numbers without end, traces without tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiny_chain
import torch
from safetensors.torch import load, save_file
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components.artifacts import Artifact
from reflux.components.calibrate import stage
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces.config import CollectTracesConfig

LATENT = {"checkpoint": "latent"}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def student(chain: Chain) -> Artifact:
    return chain.distilled(max_steps=1, on_policy_fraction=0.0)


def calibrated(chain: Chain, student: Artifact, folder: Path) -> Artifact:
    config = CalibrateConfig(student_uri=str(chain.model), check_traces=4)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(folder, "calibrate", config, **parents)
    return writer.commit(stage.run(config, **parents, bundle=writer))


def student_with(
    chain: Chain,
    student: Artifact,
    folder: Path,
    metadata: dict[str, str],
    *,
    spoiled: str = "",
    value: float = torch.nan,
    **rename: str,
) -> Artifact:
    """The student with its weights saved again, under other names, another mark, or one tensor with another value."""
    weights = load(student.file("latent.safetensors"))
    if spoiled:
        weights[spoiled][0] = value
    for old, new in rename.items():
        weights[new] = weights.pop(old.replace("__", "."))
    save_file(weights, folder / "weights", metadata=metadata)
    parents = {"traces": chain.traces, "profile": chain.profile, "labels": chain.labels}
    writer = writer_for(folder, "distill", chain.training(), **parents)
    writer.write_file("latent.safetensors", folder / "weights")
    for name in ("policy_table.bin", "scheme.json"):
        writer.write_file(name, student.file(name))
    return writer.commit({})


def test_deployed_weights_are_not_quantised_again(chain: Chain, student: Artifact, tmp_path: Path) -> None:
    deployed = student_with(chain, student, tmp_path, {"format": "pt"})
    with pytest.raises(ValueError, match="not marked as master weights; refusing to quantise it again"):
        calibrated(chain, deployed, tmp_path)


def test_weights_that_are_not_finite_are_named(chain: Chain, student: Artifact, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    broken = student_with(chain, student, tmp_path, LATENT, spoiled=name)
    with pytest.raises(ValueError, match=rf"student: {re.escape(name)} is not finite everywhere"):
        calibrated(chain, broken, tmp_path)


def test_weights_beyond_every_scale_are_named(chain: Chain, student: Artifact, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"
    large = student_with(chain, student, tmp_path, LATENT, spoiled=f"{name}.weight", value=1e6)
    with pytest.raises(ValueError, match=rf"student: {re.escape(name)}: has weights up to 1e\+06; a scale is a float"):
        calibrated(chain, large, tmp_path)


def test_activations_that_overflow_are_named_with_trace_and_position(
    chain: Chain, student: Artifact, tmp_path: Path
) -> None:
    """Weights that are finite, and a norm of which the largest float32 comes out."""
    name = "model.layers.1.post_attention_layernorm"
    wild = student_with(chain, student, tmp_path, LATENT, spoiled=f"{name}.weight", value=3e38)
    rows = [row for row in chain.traces.table("traces", ["trace_id", "split"]).to_pylist() if row["split"] == "train"]
    first = min(row["trace_id"] for row in rows)
    place = rf"model\.layers\.1\..* first at position \d+ of trace {first}"
    with pytest.raises(ValueError, match=f"calibrate: outlier thresholds: the output of {place}"):
        calibrated(chain, wild, tmp_path)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_traces_without_a_token_that_counts_are_refused(
    chain: Chain, student: Artifact, tmp_path: Path, tokens: int
) -> None:
    table = chain.traces.table("traces")
    rows = table.to_pylist()
    for row in rows:
        row["prompt_token_ids"], row["response_token_ids"] = row["prompt_token_ids"][:tokens], []
    config = CollectTracesConfig(teacher=str(chain.model), prompts_uri=str(chain.folder / "prompts.jsonl"))
    writer = writer_for(tmp_path, "collect_traces", config)
    writer.write_table("traces/00000", pa.Table.from_pylist(rows, schema=table.schema), table.schema)
    short = replace(chain, traces=writer.commit({}))
    with pytest.raises(ValueError, match="calibrate: the traces hold no training trace of 5 tokens or more"):
        calibrated(short, student, tmp_path)


def test_weights_of_another_model_are_refused(chain: Chain, student: Artifact, tmp_path: Path) -> None:
    names = {"model__layers__1__mlp__up_proj__weight": "model.layers.7.mlp.up_proj.weight"}
    foreign = student_with(chain, student, tmp_path, LATENT, **names)
    with pytest.raises(ValueError, match=r"1 weights do not belong to .*, e.g. model\.layers\.7\.mlp"):
        calibrated(chain, foreign, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check_traces": 0}, "check_traces 0: must be at least 1"),
        ({"outlier_quantile": 1.0}, r"outlier_quantile 1\.0: must be between 0 and 1"),
        ({"tolerance": 0.0}, r"tolerance 0\.0: must be positive"),
    ],
)
def test_a_bad_configuration_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"calibrate\.{message}"):
        CalibrateConfig(**options)
