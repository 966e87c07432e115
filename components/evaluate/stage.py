"""Stage 6: is the student worth deploying? Every scheme measured in one run, a verdict, a report."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components.algorithms.low_bit import profiled_table
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import read_scheme
from reflux.components.equalized import equalized
from reflux.components.models import context_length, load_model, load_tokenizer, require_same_tokenizer
from reflux.components.schemas import GENERATIONS, LATENCIES, LAYER_ERRORS, POSITION_ERRORS, SCORES, TRACE_SCORES

from . import report
from .candidates import candidates, on_kernels
from .compare import compare
from .config import EvaluateConfig
from .gate import gaps_closed, gates
from .heldout import Trace, heldout_traces
from .room import require_room
from .row import Row
from .summary import summarize, tracked_metrics, without_times
from .text import evaluation_text


def run(
    config: EvaluateConfig, *, bundle: Artifact, student: Artifact, profile: Artifact, traces: Artifact, scores: Writer
) -> dict[str, float]:
    """Write the scores of every scheme, the report and the verdict; a failed gate is a result, not an error."""
    teacher_path, base_path = scores.source("teacher"), scores.source("student_uri")
    sources = {name: scores.source_digest(name) for name in ("teacher", "student_uri")}
    tokenizer, context = load_tokenizer(base_path), context_length(base_path)
    require_same_tokenizer(load_tokenizer(teacher_path), tokenizer)
    heldout = heldout_traces(traces, config.heldout_traces, context)
    require_room(config, [len(trace.prompt_token_ids) for trace in heldout], context)
    text = evaluation_text(
        scores.source("eval_text_uri") if config.eval_text_uri else None,
        tokenizer,
        windows=config.windows,
        window_tokens=config.window_tokens,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle.download_all("", folder)
        scheme, profiled = read_scheme(folder), policy_table.decode(profile.file("policy_table.bin"))
        compared = candidates(
            teacher=None if sources["teacher"] == sources["student_uri"] else teacher_path,
            student=base_path,
            bundle=folder,
            scheme=scheme,
            policy=profiled_table(profiled, scheme, int(profile.config["activation_bits"])),
            begun=lambda: equalized(load_model(base_path), profile),
            rotated=config.rotated_baseline,
        )
        if config.low_bit_kernels:
            compared.append(on_kernels(folder))
        rows = compare(config, compared, tokenizer=tokenizer, text=text, heldout=heldout)

    gaps = gaps_closed(rows, config.seed)
    parents = {"bundle": bundle.digest, "student": student.digest, "profile": profile.digest, "traces": traces.digest}
    composition = traces.table("composition").to_pylist()
    summary = summarize(config, rows, gaps, gates(config, rows, gaps), text, parents, sources, composition)
    prompts = heldout[: config.generations]
    page = report.render(summary, rows, prompts=prompts, training=student.table("training").to_pylist())
    _write(scores, rows, prompts, summary, page)
    return tracked_metrics(summary)


def _write(scores: Writer, rows: list[Row], prompts: list[Trace], summary: dict[str, Any], page: str) -> None:
    tables = {
        "scores": (SCORES, [row.scores() for row in rows]),
        "trace_scores": (TRACE_SCORES, [score for row in rows for score in row.trace_scores()]),
        "layer_errors": (
            LAYER_ERRORS,
            [
                {"scheme": row.scheme, "layer": layer, "relative_error": error}
                for row in rows
                for layer, error in enumerate(row.layer_errors)
            ],
        ),
        "position_errors": (
            POSITION_ERRORS,
            [{"scheme": row.scheme, **asdict(error)} for row in rows for error in row.position_errors],
        ),
        "generations": (
            GENERATIONS,
            [
                {"prompt_id": trace.prompt_id, "scheme": row.scheme, "prompt": trace.prompt, "text": answer}
                for row in rows
                for trace, answer in zip(prompts, row.generations, strict=True)
            ],
        ),
    }
    for name, (schema, records) in tables.items():
        scores.write_table(name, pa.Table.from_pylist(records, schema=schema), schema)
    latencies = pa.Table.from_pylist([row.latencies() for row in rows], schema=LATENCIES)
    scores.write_table("latencies", latencies, LATENCIES, measured=True)
    content = json.dumps(without_times(summary), indent=2, allow_nan=False)
    scores.write_file("metrics.json", content.encode())
    scores.write_file("report.html", page.encode(), measured=True)
