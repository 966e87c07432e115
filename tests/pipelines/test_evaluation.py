"""`reflux evaluate`: anybody's bundle or checkpoint in the table of a run, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_bundle import write_tiny_bundle
from tiny_model import save_tiny_model

from reflux.components.bundles.stored_scheme import stored_weights
from reflux.pipelines.__main__ import cli

SMALL = ("--windows", "2", "--window-tokens", "64", "--answers", "3", "--latency-tokens", "20")


@pytest.fixture(scope="module")
def bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("given") / "bundle", tiny_model)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Why is {n} odd?"}) + "\n" for n in range(4)))
    return file


def evaluated(model: Path, base: Path, prompts: Path | None, *options: str) -> Any:
    """Without `prompts` those that the command itself asks."""
    asked = [] if prompts is None else ["--prompts", str(prompts)]
    return CliRunner().invoke(cli, ["evaluate", str(model), "--base", str(base), *asked, *SMALL, *options])


def test_a_bundle_stands_beside_its_base_imitated_and_on_kernels(bundle: Path, tiny_model: Path) -> None:
    done = evaluated(bundle, tiny_model, None, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout[done.stdout.index("{") :])
    rows = {row["scheme"]: row for row in result["table"]}
    assert list(rows) == ["fp32", "w4a16_rtn", "w4a4_given", "w4a4_deployed"]
    assert [row["latency_of"] for row in rows.values()] == ["deployed", "simulated", "simulated", "deployed"]
    assert rows["fp32"]["pmr"] == 1.0
    given, deployed = rows["w4a4_given"], rows["w4a4_deployed"]
    assert deployed["perplexity"] == pytest.approx(given["perplexity"], rel=0.1)  # bfloat16, few tokens
    assert deployed["effective_bits"] == given["effective_bits"] == 4.25
    assert deployed["memory_bytes"] < 0.5 * rows["fp32"]["memory_bytes"]
    assert result["not_run"] == []


@pytest.mark.slow
def test_what_has_no_kernel_says_why(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", tiny_model, weight_bits=8, activation_bits=16)
    done = evaluated(bundle, tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert "w8a16_given" in done.output
    assert "not run: deployed" in done.output
    assert "meets full-precision activations, which has no kernel on a CPU; weight_bits 8, group_size 64" in done.output


@pytest.mark.slow
def test_a_checkpoint_is_a_row_of_its_own(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=7)
    done = evaluated(other, tiny_model, prompts, "--json")
    rows = json.loads(done.stdout[done.stdout.index("{") :])["table"]
    assert [row["scheme"] for row in rows] == ["fp32", "given"]
    assert rows[1]["effective_bits"] == 32
    assert rows[1]["pmr"] < rows[0]["pmr"] == 1.0


def test_a_folder_that_is_no_model_is_refused(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    done = evaluated(tmp_path, tiny_model, prompts)
    assert done.exit_code == 2
    assert "is neither a bundle nor a model, it has no quant_config.json and no config.json" in done.output


def packed(**groups: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def quantised(tmp_path: Path, tiny_model: Path, **said: Any) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq"}, "quantised by 'gptq', format None; reflux reads 'compressed-tensors'"),
        (
            packed(group_0={"weights": {"num_bits": 4}}, group_1={"weights": {"num_bits": 8, "type": "float"}}),
            r"config_groups\.group_1: has weights 'float'; groups of integer weights with activations in full",
        ),
        (
            packed(group_0={"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}),
            r"config_groups\.group_0: rounds input_activations; groups of integer weights",
        ),
        (
            packed(group_0={"weights": {"num_bits": 4, "group_size": 64}}, group_1={"weights": {"num_bits": 8}}),
            "which is not installed: pip install compressed-tensors",
        ),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_named(
    tmp_path: Path, tiny_model: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stored_weights(quantised(tmp_path, tiny_model, **said))
