"""What can be known before expensive work: every input is opened, and the code that would stop a stage stops here.

Order is by cost: the store first, then what is named, then tokenizers, then the content of every file. Model weights
are not loaded. What a stage counts and sets aside (a prompt that is too long, a label of an unknown trace) is a remark,
not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reflux.components import declare, models
from reflux.components.algorithms.low_bit import FULL_PRECISION
from reflux.components.collect_traces.prompts import load_prompts
from reflux.components.evaluate.text import evaluation_text
from reflux.components.records import Record, read_records, read_text_field
from reflux.components.sources import fetch
from reflux.components.storage import S3Settings, Store


def check(configs: Mapping[str, Any], store: Store, settings: S3Settings | None = None) -> list[str]:
    """Check stage configurations (by stage name) against the world. Returns remarks for the person who starts the run.

    ValueError or StoreError names what is wrong: field, value, and what is allowed.
    """
    store.check_writable()
    paths = _fetched(configs, settings)
    collect, distill, evaluate = (configs[stage] for stage in ("collect_traces", "distill", "evaluate"))
    teacher, student = paths[collect.teacher], paths[distill.student_uri]
    tokenizer = _same_tokenizer(teacher, student)
    context = models.context_length(teacher)
    _require_context(configs, context, models.context_length(student))
    if distill.weight_bits < FULL_PRECISION:
        for width in sorted(models.layer_widths(student)):
            if width % distill.group_size:
                raise ValueError(f"distill.group_size {distill.group_size}: must divide the student's {width} channels")
    if collect.top_k > len(tokenizer):
        raise ValueError(f"collect_traces.top_k {collect.top_k}: the teacher's vocabulary has {len(tokenizer)} tokens")
    prompts, rejected = load_prompts(
        paths[collect.prompts_uri],
        tokenizer,
        heldout_fraction=collect.heldout_fraction,
        max_prompt_tokens=collect.max_prompt_tokens,
        max_total_tokens=context - collect.max_new_tokens,
    )
    evaluation_text(
        paths[evaluate.eval_text_uri] if evaluate.eval_text_uri else None,
        tokenizer,
        windows=evaluate.windows,
        window_tokens=evaluate.window_tokens,
    )
    remarks = [f"{len(prompts)} prompts, {sum(prompt.split == 'heldout' for prompt in prompts)} of them held out"]
    if rejected:
        first = rejected[0]
        remarks.append(f"{len(rejected)} prompts are set aside; the first, row {first['row']}: {first['reason']}")
    if uri := configs["ingest_labels"].labels_uri:
        remarks.append(_labels(paths[uri], {prompt.prompt_id for prompt in prompts}))
    return remarks


def _fetched(configs: Mapping[str, Any], settings: S3Settings | None) -> dict[str, Path]:
    """URI of every source -> local path, each fetched once."""
    paths: dict[str, Path] = {}
    for stage, config in configs.items():
        for name, uri in declare.source_fields(config).items():
            if uri in paths:
                continue
            try:
                paths[uri] = fetch(uri, settings)
            except (ValueError, OSError) as error:
                raise ValueError(f"{stage}.{name}: {error}") from error
    return paths


def _same_tokenizer(teacher: Path, student: Path) -> Any:
    tokenizer = models.load_tokenizer(teacher)
    if student != teacher:
        models.require_same_tokenizer(tokenizer, models.load_tokenizer(student))
    return tokenizer


def _require_context(configs: Mapping[str, Any], teacher: int, student: int) -> None:
    """Refuse lengths that a model cannot attend to; both see the sequences of distill."""
    shorter = min(teacher, student)
    limits = [
        ("collect_traces", "max_new_tokens", teacher - 1, "teacher"),  # at least one token of a prompt stands before
        ("profile_kv", "max_sequence_tokens", student, "student"),
        ("distill", "max_sequence_tokens", shorter, "student" if student < teacher else "teacher"),
        ("evaluate", "window_tokens", student, "student"),
    ]
    for stage, name, limit, who in limits:
        value = getattr(configs[stage], name)
        if value > limit:
            raise ValueError(f"{stage}.{name} {value}: at most {limit} fit into the context of the {who}")


def _labels(path: Path, prompt_ids: set[str]) -> str:
    """A remark on the labels. Which trace_ids exist is known only after the teacher answered, which prompts now."""
    refused = []
    records = list(read_records(path))
    for record in records:
        try:
            _require_known_prompt(record, prompt_ids)
        except ValueError as error:
            refused.append(f"{record.place}: {error}")
    if len(refused) == len(records):
        raise ValueError(f"labels {path.name}: no usable row; {refused[0] if refused else 'it is empty'}")
    aside = f", {len(refused)} of them are set aside; the first, {refused[0]}" if refused else ""
    return f"{len(records)} labels{aside}"


def _require_known_prompt(record: Record, prompt_ids: set[str]) -> None:
    if record.problem:
        raise ValueError(record.problem)
    prompt_id = read_text_field(record.values, "prompt_id")
    if not prompt_id and not read_text_field(record.values, "trace_id"):
        raise ValueError("trace_id, prompt_id: one of them must say what was rated")
    if prompt_id and prompt_id not in prompt_ids:
        raise ValueError(f"prompt_id {prompt_id!r}: unknown among the {len(prompt_ids)} prompts")
