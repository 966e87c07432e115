"""First look: is what the student is taught what was meant? Words, sequences, the loss itself, the teacher."""

from __future__ import annotations

import json
from statistics import fmean

from reflux.components import models
from reflux.components.distill.examples import require_contract
from reflux.pipelines.doctor.evidence import Evidence
from reflux.pipelines.doctor.finding import Finding, NothingToSeeError

FEWEST_STEPS = 8
"""From so many on it is asked whether the loss falls."""
MOST_CUT = 0.25
"""Share of sequences that may be cut."""


def tokens(evidence: Evidence) -> Finding:
    """Do teacher and student read the same token ids, and are the traces made of them?"""
    teacher, student = (models.load_tokenizer(evidence.given[name].path) for name in ("teacher", "student_uri"))
    stored = evidence.artifact("collect_traces").schema_metadata("traces")
    try:
        models.require_same_tokenizer(teacher, student)
        models.require_same_conversation(teacher, student)
        require_contract(stored, student, evidence.given["teacher"].digest)
    except ValueError as error:
        fix = "give both models one tokenizer and template, and collect the traces again"
        return Finding(check="tokens", status="fail", found=str(error), fix=fix)
    found = f"teacher, student and traces share {len(student)} token ids and the chat template"
    return Finding(check="tokens", status="ok", found=found)


def sequences(evidence: Evidence) -> Finding:
    """Is enough of each sequence left to learn from?"""
    cut, unscored = (
        fmean(step.get(name, 0.0) for step in evidence.steps) for name in ("truncation_rate", "unscored_rate")
    )
    found = f"{cut:.0%} were cut to {evidence.config.max_sequence_tokens} tokens, {unscored:.0%} had nothing to score"
    if cut <= MOST_CUT and not unscored:
        return Finding(check="sequences", status="ok", found=found)
    return Finding(check="sequences", status="warn", found=found, fix="raise distill.max_sequence_tokens")


def loss(evidence: Evidence) -> Finding:
    """Does it fall, on what is trained on and on what was kept back?"""
    if evidence.failed_step:
        found = "a step could not be made: its loss or gradient is not finite"
        return Finding(check="loss", status="fail", found=found, fix=f"reflux replay {evidence.failed_step}")
    losses = [step["loss_nats"] for step in evidence.steps]
    if len(losses) < FEWEST_STEPS:
        raise NothingToSeeError(f"{len(losses)} steps are known, too few to say whether it falls")
    quarter = len(losses) // 4
    before, after = fmean(losses[:quarter]), fmean(losses[-quarter:])
    found = f"{before:.3f} nats a token in the first quarter of {len(losses)} steps, {after:.3f} in the last"
    kept_back = _validation(evidence)
    if kept_back:
        found += f"; on traces kept back {kept_back[0]:.3f} before and {kept_back[1]:.3f} after"
    fell, generalised = after < before, not kept_back or kept_back[1] < kept_back[0]
    if fell and generalised:
        return Finding(check="loss", status="ok", found=found)
    if generalised and kept_back:
        fix = "it jumps where new rollouts begin; on traces kept back it falls, so nothing is wrong"
    elif fell:
        fix = "what is learned does not carry over: more traces, fewer steps, or distill.export=best"
    else:
        fix = "go through the checks below in their order; then lower the rates"
    return Finding(check="loss", status="warn", found=found, fix=fix)


def _validation(evidence: Evidence) -> tuple[float, float] | None:
    """Nats on traces kept back, before and after; None where they are not known."""
    metrics = evidence.made["distill"].metrics if "distill" in evidence.made else {}
    after = [metrics[name] for name in ("validation_loss_ema_nats", "validation_loss_last_nats") if name in metrics]
    before = metrics.get("validation_loss_before_nats")
    return (before, after[0]) if before is not None and after else None


def teacher(evidence: Evidence) -> Finding:
    """Does it compute in the type in which its answers were made, and are its weights whole?"""
    config, source = evidence.config, evidence.given["teacher"]
    scores_in = str(models.compute_dtype(config.compute_dtype)).removeprefix("torch.")
    found = f"answered in {evidence.collecting.dtype}, scores rollouts in {scores_in}"
    if source.path.suffix == ".gguf":
        found += "; its weights come from a GGUF file, quantised or not"
    elif (said := _quantised_by(evidence)) is not None:
        fix = "what it lost by that is taught as well: take the model in full precision"
        return Finding(check="teacher", status="warn", found=f"{found}; its weights are quantised by {said}", fix=fix)
    if scores_in != evidence.collecting.dtype:
        fix = "collect_traces.dtype and distill.compute_dtype alike: two types are two teachers"
        return Finding(check="teacher", status="warn", found=found, fix=fix)
    return Finding(check="teacher", status="ok", found=found)


def _quantised_by(evidence: Evidence) -> str | None:
    text = (evidence.given["teacher"].path / "config.json").read_text(encoding="utf-8")
    said = json.loads(text).get("quantization_config")
    return None if said is None else str(said.get("quant_method"))
