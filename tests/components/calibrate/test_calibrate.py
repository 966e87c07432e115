"""The bundle: its bytes, that it is the model that was trained, and that it serves without an installed reflux."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_chain
import torch
from safetensors.torch import load, load_file, save_file
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components import models
from reflux.components.algorithms.low_bit import (
    FULL_PRECISION,
    SITES,
    Scheme,
    apply_scheme,
    full_precision_activations,
    watching_sites,
)
from reflux.components.algorithms.quantizers import weight_codes, weight_values
from reflux.components.artifacts import Artifact
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.outliers import FIRST_POSITION, counting_outliers
from reflux.components.bundles.packed_linear import pack
from reflux.components.calibrate import stage
from reflux.components.calibrate.bundle_files import fallback
from reflux.components.calibrate.card import model_card
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.calibrate.export import RUNTIME


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def student(chain: Chain) -> Artifact:
    return chain.distilled(max_steps=3)


def calibrated(chain: Chain, student: Artifact, folder: Path, **options: Any) -> Artifact:
    config = CalibrateConfig(student_uri=str(chain.model), check_traces=4, **options)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(folder, "calibrate", config, **parents)
    return writer.commit(stage.run(config, **parents, bundle=writer))


@pytest.fixture(scope="module")
def artifact(chain: Chain, student: Artifact) -> Artifact:
    return calibrated(chain, student, chain.folder)


@pytest.fixture(scope="module")
def delivered(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python3 and a space") / "bundle"
    artifact.download_all("", folder)
    return folder


@pytest.fixture
def bundle(delivered: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(delivered, tmp_path / "bundle"))


def trained(chain: Chain, student: Artifact) -> Any:
    table = policy_table.decode(student.file("policy_table.bin"))
    model = apply_scheme(models.load_model(chain.model), Scheme(), table)
    model.load_state_dict(load(student.file("latent.safetensors")), strict=False)
    return model


def some_input(length: int = 24) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 259, (1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.arange(length)[None]}


def test_the_loaded_bundle_is_the_trained_forward(
    chain: Chain, student: Artifact, artifact: Artifact, delivered: Path
) -> None:
    assert artifact.metrics["export_difference_nats"] <= 1e-5
    ours, theirs = trained(chain, student), load_bundle(delivered)
    assert not theirs.training
    assert not any(p.requires_grad for p in theirs.parameters())
    with torch.no_grad():
        torch.testing.assert_close(ours(**some_input()).logits, theirs(**some_input()).logits, rtol=0, atol=1e-5)


def test_codes_and_scales_are_stored_as_compressed_tensors_stores_them(
    chain: Chain, student: Artifact, delivered: Path
) -> None:
    stored, latent = load_file(delivered / "model.safetensors"), load(student.file("latent.safetensors"))
    linears = [name.removesuffix(".weight") for name in latent if name.endswith("_proj.weight")]
    assert len(linears) == 2 * 7
    for name in linears:
        weight_OI = latent[f"{name}.weight"]
        assert latent[f"{name}.log_clip_OG"].any()
        codes_OI, scale_OG = weight_codes(weight_OI, 4, 64, latent[f"{name}.log_clip_OG"])
        assert not {f"{name}.weight", f"{name}.log_clip_OG"} & stored.keys()
        assert stored[f"{name}.weight_shape"].tolist() == list(weight_OI.shape)
        assert torch.equal(stored[f"{name}.weight_packed"], pack(codes_OI, 4))
        assert stored[f"{name}.weight_scale"].dtype == torch.float16
        restored_OI = weight_values(codes_OI, stored[f"{name}.weight_scale"].float())
        assert torch.equal(restored_OI, weight_values(codes_OI, scale_OG))
    assert "lm_head.weight" not in stored  # tied to the embedding
    base = models.load_model(chain.model).state_dict()
    assert torch.equal(stored["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    quantization = json.loads((delivered / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "pack-quantized")
    assert quantization["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def test_quant_config_describes_every_linear_and_site(delivered: Path, student: Artifact) -> None:
    config = json.loads((delivered / "quant_config.json").read_text())
    assert config["checkpoint"] == "deployed"
    assert len(config["weights"]) == 2 * 7
    assert config["scheme_sha256"] == read_scheme(delivered).digest()
    table = policy_table.decode((delivered / "policy_table.bin").read_bytes())
    assert (delivered / "policy_table.bin").read_bytes() == student.file("policy_table.bin")
    assert config["activations"].keys() == {f"layers.{layer}.{site}" for layer in range(2) for site in SITES}
    for site, entry in config["activations"].items():
        assert entry["scale_main"] == table.scales()[table.index[site], :, 0].tolist()
        assert len(entry["scale_main"]) == len(entry["scale_outlier"]) == len(config["position_knots"])


def test_thresholds_are_quantiles_of_what_enters_each_site(
    chain: Chain, student: Artifact, artifact: Artifact, delivered: Path
) -> None:
    thresholds = {
        site: entry["outlier_threshold"]
        for site, entry in json.loads((delivered / "quant_config.json").read_text())["activations"].items()
    }
    rows = [row for row in chain.traces.table("traces").to_pylist() if row["split"] == "train"]
    rows = sorted(rows, key=lambda row: row["trace_id"])[:4]
    model, largest = trained(chain, student), dict[str, list[float]]()

    def see(site: str, x_BTD: torch.Tensor) -> None:
        largest.setdefault(site, []).extend(x_BTD.abs().amax(-1)[0, FIRST_POSITION:].tolist())

    with torch.no_grad(), counting_outliers(model, thresholds) as count, watching_sites(model, see):
        for row in rows:
            ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
            model(ids, position_ids=torch.arange(ids.shape[1])[None])
    assert thresholds == pytest.approx({site: np.quantile(seen, 0.99) for site, seen in largest.items()}, rel=1e-4)
    assert count.seen == sum(map(len, largest.values()))
    assert count.beyond == sum(value > thresholds[site] for site, seen in largest.items() for value in seen)
    assert 0 < count.share < 0.02
    later = artifact.metrics["checked_tokens"] - FIRST_POSITION * artifact.metrics["checked_traces"]
    assert later * len(thresholds) == count.seen
    with counting_outliers(model, {}) as nothing:
        model(**some_input())
    assert nothing.share == 0
    everything = dict.fromkeys(thresholds, -1.0)
    with torch.no_grad(), counting_outliers(model, everything) as count:
        model(**some_input(FIRST_POSITION))
        assert count.seen == 0
        model(some_input(3)["input_ids"].expand(2, -1), position_ids=torch.arange(3, 6)[None])
    assert count.seen == count.beyond == 2 * 2 * len(thresholds)


def test_weights_stay_low_bit_on_the_full_precision_path(delivered: Path, chain: Chain, student: Artifact) -> None:
    model = load_bundle(delivered)
    weights_only = apply_scheme(models.load_model(chain.model), Scheme(activation_bits=FULL_PRECISION))
    weights_only.load_state_dict(load(student.file("latent.safetensors")), strict=False)
    with torch.no_grad():
        rounded = model(**some_input()).logits
        with full_precision_activations(model):
            ours = model(**some_input()).logits
        torch.testing.assert_close(ours, weights_only(**some_input()).logits, rtol=0, atol=1e-5)
    assert (ours - rounded).abs().max() > 0.01


def test_progress_names_what_each_pass_is(
    chain: Chain, student: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated(chain, student, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("progress")]
    passes = [line[line.index("(") + 1 : -1] for line in lines if "100 %" in line]
    assert passes == ["outlier thresholds", "trained forward", "exported bundle"]
    assert all("(" in line for line in lines)


def edited(bundle: Path, **values: Any) -> None:
    path = bundle / "quant_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def latent_inside(bundle: Path) -> None:
    weights = load_file(bundle / "model.safetensors")
    save_file(weights, bundle / "model.safetensors", metadata={"checkpoint": "latent"})


def without_a_tensor(bundle: Path) -> None:
    weights = load_file(bundle / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, bundle / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bundle: (bundle / "quant_config.json").unlink(), "is no bundle, it has no quant_config.json"),
        (lambda bundle: edited(bundle, format="reflux-bundle/9"), "format 'reflux-bundle/9', this reflux reads"),
        (lambda bundle: edited(bundle, checkpoint="latent"), "checkpoint 'latent', a bundle holds deployed weights"),
        (lambda bundle: edited(bundle, scheme_sha256="0"), "scheme_sha256 is not that of the scheme beside it"),
        (latent_inside, "holds latent master weights, not deployed ones"),
        (without_a_tensor, r"does not fit config\.json; differing: \['model\.norm\.weight'\]"),
        (lambda bundle: (bundle / "policy_table.bin").write_bytes(b"RFXTABLE"), "policy table"),
    ],
)
def test_a_damaged_or_foreign_bundle_is_refused(bundle: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(bundle)
    with pytest.raises(ValueError, match=message):
        load_bundle(bundle)


def test_a_scheme_that_was_changed_is_refused(bundle: Path) -> None:
    scheme = json.loads((bundle / "quant_config.json").read_text())["scheme"]
    edited(bundle, scheme=scheme | {"activation_bits": 8})
    with pytest.raises(ValueError, match="scheme_sha256 is not that of the scheme"):
        read_scheme(bundle)


def test_equal_work_gives_an_equal_bundle(chain: Chain, student: Artifact, artifact: Artifact, tmp_path: Path) -> None:
    assert calibrated(chain, student, tmp_path).digest == artifact.digest


def test_a_model_without_rounded_activations_is_a_bundle_too(chain: Chain, tmp_path: Path) -> None:
    student = chain.distilled(activation_bits=FULL_PRECISION, max_steps=2, on_policy_fraction=0.0)
    calibrated(chain, student, tmp_path).download_all("", tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "policy_table.bin").exists()
    model = load_bundle(tmp_path / "bundle")
    assert torch.isfinite(model(**some_input()).logits).all()


def alone(bundle: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the bundle with the installed libraries, but without what makes reflux importable: -S leaves
    out the hooks of site-packages, an editable install's among them.
    """
    environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-S", *command], cwd=bundle, env=environment, text=True, capture_output=True, timeout=250
    )


def test_the_scripts_work_where_reflux_is_not_installed(bundle: Path, tmp_path: Path) -> None:
    missing = alone(tmp_path, "-c", "import reflux")
    assert "No module named 'reflux'" in missing.stderr

    answered = alone(bundle, "fallback.py", "What is 3 and 3?", "python3?")
    assert answered.returncode == 0, answered.stderr
    *answers, counted = map(json.loads, answered.stdout.splitlines())
    assert len(answers) == 2
    assert all(answer["path"] in ("low_bit", "w4a16") and 0 <= answer["outlier_share"] <= 1 for answer in answers)
    assert sum(counted["answered"].values()) == 2

    (bundle / "queries.txt").write_text(f"What is 3 and 3?\n\nx\nWhat is an outlier?\n{'long ' * 110}\n")
    checked = alone(bundle, "calibrate.py", "queries.txt", "--report", "report.json")
    assert checked.returncode == 0, checked.stderr
    report = json.loads((bundle / "report.json").read_text())
    assert report["queries"] == 3
    assert report["queries_too_short"] == 1  # one of a single byte has nothing to predict
    assert report["queries_cut"] == 1  # the context is 512 bytes
    assert 1 < report["perplexity"]["low_bit"] < 10_000
    assert report["perplexity"].keys() == report["forward_ms_p50"].keys() == {"low_bit", "w4a16"}
    assert report["latency_of"] == "simulated"


def test_the_runtime_is_complete() -> None:
    """Every reflux module that a module of the runtime imports, at its top or later, travels with it."""
    root = Path(stage.__file__).parents[2]
    held = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in RUNTIME}
    for name in RUNTIME:
        package = name.removesuffix(".py").replace("/", ".").split(".")[:-1]
        for node in ast.walk(ast.parse((root / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("reflux.")):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*base, *(node.module or "").removeprefix("reflux.").split(".")]).strip(".")
                wanted = {module} if module in held else {f"{module}.{alias.name}" for alias in node.names}
                assert wanted <= held, f"{name} imports {wanted - held}"


def test_a_prompt_with_too_many_outliers_takes_the_other_path(bundle: Path) -> None:
    edited(bundle, fallback_outlier_share=0.999)
    server = fallback.Server(bundle)
    assert server.answer("What is 3 and 3?", 4)["path"] == "low_bit"
    server.thresholds = dict.fromkeys(server.thresholds, 0.0)
    flooded = server.answer("What is 3 and 3?", 4)
    assert (flooded["path"], flooded["outlier_share"]) == ("w4a16", 1.0)
    assert server.answered == {"low_bit": 1, "w4a16": 1}


def test_the_other_path_may_be_the_model_that_the_bundle_was_made_from(bundle: Path, tiny_model: Path) -> None:
    server = fallback.Server(bundle, tiny_model)
    server.thresholds = dict.fromkeys(server.thresholds, 0.0)
    flooded = server.answer("What is 3 and 3?", 4)
    assert flooded["path"] == "full_precision"
    tokenizer, original = models.load_tokenizer(tiny_model), models.load_model(tiny_model)
    ids = torch.tensor([models.chat_token_ids(tokenizer, "What is 3 and 3?")])
    greedy = original.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert flooded["text"] == tokenizer.decode(greedy[0, ids.shape[1] :], skip_special_tokens=True)


def test_another_model_and_a_prompt_without_end_are_refused(bundle: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"--full-precision .*other: is sha256:\w+, and this bundle was made from sha256"
    ):
        fallback.Server(bundle, other)
    with pytest.raises(ValueError, match="no such file or folder"):
        fallback.Server(bundle, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"prompt of \d+ tokens: with 96 of an answer the model has \d+ places"):
        fallback.Server(bundle).answer("again " * 5000)


def test_the_card_says_what_the_scheme_costs(tiny_model: Path) -> None:
    model = models.load_model(tiny_model)
    card = model_card("tiny", model, Scheme(), {"student": "sha256:ab"})
    assert "# tiny, W4A4" in card
    assert "4 bits, symmetric, groups of 64: effective bits per weight 4.25 (code 4.00, scale 0.25)" in card
    assert "4 bits, dual: effective bits per value 5.20 (code 4.00, flag 1.00, scale 0.20)" in card
    assert "| layers of other bits | none |" in card
    assert "student `sha256:ab`" in card
    mixed = model_card("tiny", model, Scheme(exceptions=("down_in=8",)), {})
    assert "| layers of other bits | `down_in=8` |" in mixed
    assert all("vllm serve . --quantization reflux" in text for text in (card, mixed))
    cached = model_card("tiny", model, Scheme(kv_cache="int8", rope_bits=8), {})
    assert "# not in vLLM, which does not compute kv_cache, rope_bits" in cached
    assert "vllm serve" not in cached
    narrow = model_card("tiny", model, Scheme(embedding_bits=8), {})
    assert "| embedding and lm_head; norms | 8 bits; full precision, not turned |" in narrow
    assert "| channels, as profiled | as in the base |" in narrow
    assert "| equalised before rounding" in model_card("tiny", model, Scheme(), {}, equalized=True)
    assert "# not in vLLM, which does not compute embedding_bits" in narrow
    unquantised = model_card("tiny", model, Scheme(weight_bits=16, activation_bits=16), {})
    assert "| weights | full precision |\n| activations | full precision |" in unquantised
