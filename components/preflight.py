"""What can be known before expensive work: every input is opened, and the code that would stop a stage stops here.

Order is by cost: the store first, then what is named, then tokenizers, then the content of every file. Model weights
are not loaded. What a stage counts and sets aside (a prompt that is too long, a label of an unknown trace) is a remark,
not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reflux.components import declare, models, registry, sources
from reflux.components.algorithms.key_tokens import check_strategies
from reflux.components.algorithms.low_bit import require_fitting
from reflux.components.algorithms.same_function import require_parts
from reflux.components.collect_traces.answers import trace_id
from reflux.components.collect_traces.choice import asked_prompts
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.teachers import teacher_ids
from reflux.components.collect_traces.teachers.server import check_server, configured_servers
from reflux.components.distill.examples import require_usable
from reflux.components.distill.memory import need_of, require_memory
from reflux.components.distill.stage import remarks as remarks_on_training
from reflux.components.distill.stage import scheme_of, steps_of
from reflux.components.distill.start import find_start
from reflux.components.evaluate.room import require_room
from reflux.components.evaluate.text import evaluation_text
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.stage import ingest, load
from reflux.components.model_files import require_model_files
from reflux.components.storage import S3Settings, Store


def check(
    configs: Mapping[str, Any], store: Store, settings: S3Settings | None = None, *, weights: bool = True
) -> list[str]:
    """Check stage configurations (by stage name) against the world. Returns remarks for the person who starts the run.

    ValueError, StoreError or ConnectionError names what is wrong: field, value, and what is allowed. Servers of
    teachers are asked for their models and for two tokens. `weights`: fetch those of models in S3 as well, for stages
    that will find them on this machine.
    """
    store.check_writable()
    registry.require_possible(configs["evaluate"].registered_model, store)
    paths = _fetched(configs, settings, weights)
    collect, distill, evaluate = (configs[stage] for stage in ("collect_traces", "distill", "evaluate"))
    teacher, student = paths[collect.teacher], paths[distill.student_uri]
    for name, path in {"teacher": teacher, "student": student}.items():
        try:
            require_model_files(path)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    tokenizer = _same_tokenizer(teacher, student)
    context = models.context_length(teacher)
    _require_context(configs, context, models.context_length(student))
    try:
        require_fitting(models.skeleton(student), scheme_of(distill))
    except ValueError as error:
        raise ValueError(f"distill.{error}") from None
    check_strategies(collect.key_token_strategies, collect.key_token_weights)
    steps_of(distill, has_policy=scheme_of(distill).needs_policy)
    equalizes = configs["profile_kv"].equalization_power > 0
    if equalizes:
        _require_equalizable(student)
    begun_policy = None
    if distill.start_uri:
        found = find_start(paths[distill.start_uri], scheme_of(distill), equalized=equalizes, whole=weights)
        begun_policy = found.policy()
    if distill.compares_layers:
        _require_same_layers(teacher, student)
    require_usable(distill, collect.trace_store, collect.top_k)
    if collect.trace_store == "topk" and collect.top_k > len(tokenizer):
        raise ValueError(f"collect_traces.top_k {collect.top_k}: the teacher's vocabulary has {len(tokenizer)} tokens")
    asked = asked_prompts(paths[collect.prompts_uri], tokenizer, collect, context)
    prompts, rejected = asked.prompts, asked.rejected
    _require_fitting_prompts(configs, prompts, context, models.context_length(student))
    for server in configured_servers(collect):
        check_server(server, prompts, tokenizer, collect)
    evaluation_text(
        paths[evaluate.eval_text_uri] if evaluate.eval_text_uri else None,
        tokenizer,
        windows=evaluate.windows,
        window_tokens=evaluate.window_tokens,
    )
    remarks = [f"{len(prompts)} prompts, {sum(prompt.split == 'heldout' for prompt in prompts)} of them held out"]
    remarks += remarks_on_training(distill, profiled_policy=scheme_of(distill).needs_policy and begun_policy is None)
    needed = need_of(distill, student, teacher)
    remarks.append(require_memory(needed, distill) if weights else f"distill: {needed.described()}")
    if collect.prompts_per_dimension:
        counts = ", ".join(f"{row['dimension']} {row['asked']} of {row['usable']}" for row in asked.composition)
        remarks.append(f"prompts by dimension: {counts}")
    if rejected:
        first = rejected[0]
        remarks.append(f"{len(rejected)} prompts are set aside; the first, row {first['row']}: {first['reason']}")
    if uri := configs["ingest_labels"].labels_uri:
        remarks.append(_labels(paths[uri], prompts, collect, settings, weights))
    return remarks


def _require_equalizable(student: Path) -> None:
    try:
        require_parts(models.skeleton(student), "equalise")
    except ValueError as error:
        raise ValueError(f"profile_kv.equalization_power: {error}; 0 leaves it as it is") from None


def _fetched(configs: Mapping[str, Any], settings: S3Settings | None, weights: bool) -> dict[str, Path]:
    """URI of every source -> local path, each fetched once."""
    paths: dict[str, Path] = {}
    for stage, config in configs.items():
        for name, uri in declare.source_fields(config).items():
            if uri in paths:
                continue
            try:
                paths[uri] = sources.fetch(uri, settings, weights=weights)
            except (ValueError, OSError) as error:
                raise ValueError(f"{stage}.{name}: {error}") from error
    return paths


def _same_tokenizer(teacher: Path, student: Path) -> Any:
    tokenizer = models.load_tokenizer(teacher)
    if student != teacher:
        other = models.load_tokenizer(student)
        models.require_same_tokenizer(tokenizer, other)
        models.require_same_conversation(tokenizer, other)
    for path in {teacher, student}:
        models.require_rows(path, tokenizer)
    return tokenizer


def _require_same_layers(teacher: Path, student: Path) -> None:
    """Refuse what compares hidden states of models that have none in common."""
    shapes = [models.model_shape(path) for path in (teacher, student)]
    of_teacher, of_student = ((shape.layers, shape.hidden) for shape in shapes)
    if of_teacher != of_student:
        raise ValueError(
            f"distill.objective, warmup_patience: bridge and the activation KL compare hidden states; the teacher has "
            f"{of_teacher[0]} layers of {of_teacher[1]}, the student {of_student[0]} of {of_student[1]}"
        )


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


def _require_fitting_prompts(configs: Mapping[str, Any], prompts: list[Prompt], teacher: int, student: int) -> None:
    """Refuse what would only show once all answers are there, or once training is over. Contexts in tokens."""
    collect, distill, evaluate = (configs[stage] for stage in ("collect_traces", "distill", "evaluate"))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if student < teacher and longest + collect.max_new_tokens > student:
        raise ValueError(
            f"collect_traces.max_new_tokens {collect.max_new_tokens}: after the longest prompt, {longest} tokens, an "
            f"answer would outgrow the student's context, {student}"
        )
    lengths = {split: [len(p.token_ids) for p in prompts if p.split == split] for split in ("train", "heldout")}
    usable = sum(length < distill.max_sequence_tokens for length in lengths["train"])
    if usable <= distill.validation_traces:
        raise ValueError(
            f"distill.validation_traces {distill.validation_traces}: there are only {usable} training prompts shorter "
            f"than distill.max_sequence_tokens {distill.max_sequence_tokens}"
        )
    # which of them come first by trace_id takes a digest of the teacher to know: the longest has to fit
    require_room(evaluate, [max(lengths["heldout"])], student)


def _labels(
    path: Path, prompts: list[Prompt], collect: CollectTracesConfig, settings: S3Settings | None, weights: bool
) -> str:
    """A remark on the labels, read as the stage will read them.

    Which traces there will be is known before the teacher answers; how many steps an answer has is not, but it has no
    more than tokens. The ids of traces take the digest of the whole teacher, so without `weights` the stage finds out.
    """
    records = load(path)
    if named := sum(bool(record.values.get("trace_id")) for record in records):
        if not weights:
            return f"{len(records)} labels, of which {named} name traces: they are compared when these are there"
        digest = sources.digest(sources.fetch(collect.teacher, settings))
        asked = [(prompt, teacher_id) for teacher_id in teacher_ids(collect, digest) for prompt in prompts]
        ids = [(trace_id(prompt, collect, teacher_id), prompt) for prompt, teacher_id in asked]
    else:
        ids = [(prompt.prompt_id, prompt) for prompt in prompts]
    traces = Traces(
        (
            {"trace_id": name, "prompt_id": prompt.prompt_id, "step_starts": range(collect.max_new_tokens)}
            for name, prompt in ids
        ),
        foreseen=True,
    )
    found = ingest(records, path.name, traces)
    refused = found.rejected
    remark = f"{len(found.labels) + len(found.marks) + len(refused)} labels"
    if refused:
        first = refused[0]
        remark += f", {len(refused)} of them are set aside; the first, row {first['row']}: {first['reason']}"
    return remark
