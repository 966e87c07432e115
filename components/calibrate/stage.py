"""Freeze the trained student into a bundle, and prove that the bundle is the model that was trained."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reflux.components import models, progress
from reflux.components.algorithms.layer_bits import FULL_PRECISION
from reflux.components.algorithms.low_bit import (
    LowBitLinear,
    Scheme,
    apply_scheme,
    bits_of_sites,
    decoder_layers,
    frozen_weights,
    watching_sites,
)
from reflux.components.algorithms.low_bit_embedding import tables
from reflux.components.algorithms.not_finite import require_finite
from reflux.components.algorithms.output_head import final_hidden_states
from reflux.components.algorithms.quantizers import require_grid
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import latent, policy_table
from reflux.components.bundles.bundle import load_bundle, quantized_bits
from reflux.components.bundles.outliers import FIRST_POSITION
from reflux.components.equalized import is_equalized
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
            base_digest=bundle.source_digest("student_uri"),
            card=model_card(base_path.stem, model, scheme, parents, equalized=is_equalized(profile)),
        )
        exported = load_bundle(folder)
        _require_equal_weights(model, exported, scheme)
        difference = max(
            (ours - theirs).abs().max().item()
            for ours, theirs in zip(trained_logprobs, _logprobs(exported, sequences, "exported bundle"), strict=True)
        )
        if not difference <= config.tolerance:  # NaN is no agreement
            raise ValueError(
                f"calibrate: the exported model differs from the trained one by {difference:.2g} nats, allowed is "
                f"{config.tolerance:.2g} (calibrate.tolerance)"
            )
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            bundle.write_file(path.relative_to(folder).as_posix(), path)
        size = sum(path.stat().st_size for path in files)
    return {
        "export_difference_nats": difference,
        "bundle_bytes": float(size),
        "checked_traces": float(len(sequences)),
        "checked_tokens": float(sum(map(len, sequences.values()))),
    }


def _check_sequences(traces: Artifact, count: int) -> dict[str, list[int]]:
    """Trace id -> token ids of the first training traces that have a token which counts for the thresholds. ValueError
    if there is none.
    """
    columns = ["trace_id", "split", "prompt_token_ids", "response_token_ids"]
    rows = [row for row in traces.table("traces", columns).to_pylist() if row["split"] == "train"]
    token_ids = {row["trace_id"]: row["prompt_token_ids"] + row["response_token_ids"] for row in rows}
    usable = {trace_id: ids for trace_id, ids in sorted(token_ids.items()) if len(ids) > FIRST_POSITION}
    if not usable:
        raise ValueError(
            f"calibrate: the traces hold no training trace of {FIRST_POSITION + 1} tokens or more, on which thresholds "
            "are calibrated and the bundle is checked"
        )
    return dict([*usable.items()][:count])


def _trained(student: Artifact, base_path: Path, scheme: Scheme, scratch: Path) -> Any:
    """The forward that was trained: the base model with the student's master weights and table, under its scheme."""
    policy = policy_table.decode(student.file("policy_table.bin")) if scheme.needs_policy else None
    model = apply_scheme(models.load_model(base_path), scheme, policy)
    file = scratch / latent.NAME
    student.download(latent.NAME, file)
    latent.load_latent(model, file, who="student", base=base_path.name)
    for name, module in model.named_modules():
        if isinstance(module, LowBitLinear):
            require_grid(module.weight, module.bits, module.group_size, f"student: {name}", module.has_zero_points)
    return model


@torch.no_grad()
def _logprobs(model: Any, sequences: dict[str, list[int]], phase: str) -> list[torch.Tensor]:
    """Per sequence, [T] log-probabilities of its own next tokens. `phase` is what progress calls this pass. ValueError
    that names the place where numbers stop being finite.
    """
    results = []
    for done, (trace_id, ids) in enumerate(sequences.items()):
        input_BT, mask_BT, position_BT = padded([ids], 0)
        forward = partial(model, input_BT, attention_mask=mask_BT, position_ids=position_BT)
        logits_TV = forward().logits[0, :-1].float()
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, input_BT[0, 1:, None])[:, 0]
        require_finite(logprobs_T, f"calibrate: {phase}", [f"trace {trace_id}"], model, forward)
        results.append(logprobs_T)
        progress.report(done + 1, len(sequences), "traces", phase)
    return results


@torch.no_grad()
def _outlier_thresholds(
    model: Any, scheme: Scheme, sequences: dict[str, list[int]], quantile: float
) -> dict[str, float]:
    """Site that rounds -> quantile, over tokens from FIRST_POSITION on, of the largest |x| that enters it. ValueError
    as in `_logprobs`.
    """
    rounding = {site for site, bits in bits_of_sites(model, scheme).items() if bits < FULL_PRECISION}
    if not rounding:
        return {}
    largest: dict[str, list[torch.Tensor]] = defaultdict(list)

    def see(site: str, x_BTD: torch.Tensor) -> None:
        if site in rounding:
            largest[site].append(x_BTD[:, FIRST_POSITION:].abs().amax(-1).flatten())

    with watching_sites(model, see):
        for done, (trace_id, ids) in enumerate(sequences.items()):
            input_BT, mask_BT, position_BT = padded([ids], 0)
            forward = partial(final_hidden_states, model, input_BT, mask_BT, position_BT)
            require_finite(forward(), "calibrate: outlier thresholds", [f"trace {trace_id}"], model, forward)
            progress.report(done + 1, len(sequences), "traces", "outlier thresholds")
    return {site: torch.cat(parts).quantile(quantile).item() for site, parts in largest.items()}


def _require_equal_weights(trained: Any, exported: Any, scheme: Scheme) -> None:
    """Every decoder linear of the bundle equals the trained forward's rounded weight to the last bit, embedding and
    head too.
    """
    assert len(decoder_layers(trained)) == len(decoder_layers(exported))
    expected = {name: trained.get_submodule(name).rounded() for name in quantized_bits(trained, scheme)}
    for name, weight in (expected | {name: table.weight for name, table in tables(trained).items()}).items():
        if not torch.equal(weight, exported.get_submodule(name).weight):
            raise ValueError(f"calibrate: the exported weight of {name} is not the one that was trained")
