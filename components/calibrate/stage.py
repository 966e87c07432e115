"""Freeze the trained student into a bundle, and prove that the bundle is the model that was trained."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from reflux.components import models, progress
from reflux.components.algorithms.layer_bits import FULL_PRECISION
from reflux.components.algorithms.low_bit import (
    Scheme,
    apply_scheme,
    bits_of_sites,
    decoder_layers,
    frozen_weights,
    watching_sites,
)
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import latent, policy_table
from reflux.components.bundles.bundle import load_bundle, quantized_bits
from reflux.components.sequences import padded

from .card import model_card
from .config import CalibrateConfig
from .export import write_bundle


def run(
    config: CalibrateConfig, *, student: Artifact, profile: Artifact, traces: Artifact, bundle: Writer
) -> dict[str, float]:
    """Write the bundle's files; return how far its forward is from the trained one. ValueError if it is too far."""
    base_path = bundle.source("student_uri")
    tokenizer = models.load_tokenizer(base_path)
    sequences = _check_sequences(traces, config.check_traces)
    scheme = Scheme.from_json(json.loads(student.file("scheme.json")))
    with tempfile.TemporaryDirectory() as scratch:
        model = _trained(student, base_path, scheme, Path(scratch))
        folder = Path(scratch) / "bundle"
        folder.mkdir()
        with frozen_weights(model):
            thresholds = _outlier_thresholds(model, scheme, sequences, config.outlier_quantile)
            trained_logprobs = _logprobs(model, sequences, "trained forward")
        parents = {"student": student.digest, "profile": profile.digest, "traces": traces.digest}
        write_bundle(
            folder,
            model,
            tokenizer,
            scheme,
            thresholds=thresholds,
            fallback_share=config.fallback_outlier_share,
            card=model_card(base_path.stem, model, scheme, parents),
        )
        exported = load_bundle(folder)
        _require_equal_weights(model, exported, scheme)
        difference = max(
            (ours - theirs).abs().max().item()
            for ours, theirs in zip(trained_logprobs, _logprobs(exported, sequences, "exported bundle"), strict=True)
        )
        if difference > config.tolerance:
            raise ValueError(
                f"calibrate: the exported model differs from the trained one by {difference:.2g} nats, allowed is "
                f"{config.tolerance:.2g} (calibrate.tolerance)"
            )
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            bundle.write_file(path.relative_to(folder).as_posix(), path)
        size = sum(path.stat().st_size for path in files)
    return {"export_difference_nats": difference, "bundle_bytes": float(size), "checked_traces": float(len(sequences))}


def _check_sequences(traces: Artifact, count: int) -> list[list[int]]:
    columns = ["trace_id", "split", "prompt_token_ids", "response_token_ids"]
    rows = [row for row in traces.table("traces", columns).to_pylist() if row["split"] == "train"]
    rows = sorted(rows, key=lambda row: row["trace_id"])[:count]
    return [row["prompt_token_ids"] + row["response_token_ids"] for row in rows]


def _trained(student: Artifact, base_path: Path, scheme: Scheme, scratch: Path) -> Any:
    """The forward that was trained: the base model with the student's master weights and table, under its scheme."""
    policy = policy_table.decode(student.file("policy_table.bin")) if scheme.needs_policy else None
    model = apply_scheme(models.load_model(base_path), scheme, policy)
    file = scratch / latent.NAME
    student.download(latent.NAME, file)
    latent.load_latent(model, file, who="student", base=base_path.name)
    return model


@torch.no_grad()
def _logprobs(model: Any, sequences: list[list[int]], phase: str) -> list[torch.Tensor]:
    """Per sequence, [T] log-probabilities of its own next tokens. `phase` is what progress calls this pass."""
    results = []
    for done, ids in enumerate(sequences):
        input_BT, mask_BT, position_BT = padded([ids], 0)
        logits_TV = model(input_BT, attention_mask=mask_BT, position_ids=position_BT).logits[0, :-1].float()
        results.append(logits_TV.log_softmax(-1).gather(-1, input_BT[0, 1:, None])[:, 0])
        progress.report(done + 1, len(sequences), "traces", phase)
    return results


@torch.no_grad()
def _outlier_thresholds(model: Any, scheme: Scheme, sequences: list[list[int]], quantile: float) -> dict[str, float]:
    """Site that rounds -> quantile over tokens of the largest |x| that enters it."""
    rounding = {site for site, bits in bits_of_sites(model, scheme).items() if bits < FULL_PRECISION}
    if not rounding:
        return {}
    largest: dict[str, list[torch.Tensor]] = defaultdict(list)

    def see(site: str, x_BTD: torch.Tensor) -> None:
        if site in rounding:
            largest[site].append(x_BTD.abs().amax(-1).flatten())

    with watching_sites(model, see):
        for done, ids in enumerate(sequences):
            input_BT, mask_BT, position_BT = padded([ids], 0)
            model.model(input_BT, attention_mask=mask_BT, position_ids=position_BT)
            progress.report(done + 1, len(sequences), "traces", "outlier thresholds")
    return {site: torch.cat(parts).quantile(quantile).item() for site, parts in largest.items()}


def _require_equal_weights(trained: Any, exported: Any, scheme: Scheme) -> None:
    """Every decoder linear of the bundle equals the trained forward's rounded weight, to the last bit."""
    assert len(decoder_layers(trained)) == len(decoder_layers(exported))
    for name in quantized_bits(trained, scheme):
        if not torch.equal(trained.get_submodule(name).rounded(), exported.get_submodule(name).weight):
            raise ValueError(f"calibrate: the exported weight of {name} is not the one that was trained")
