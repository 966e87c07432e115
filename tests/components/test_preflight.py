"""Preflight: every input that would stop a stage later is refused before any work, by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import openai_server
from stage_writers import writer_for
from tiny_bundle import write_tiny_bundle
from transformers import Phi3Config, Phi3ForCausalLM

from reflux.components import preflight
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces import stage as collect_traces
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.storage import Store, StoreError

PROMPTS = [{"prompt_id": f"p{n}", "prompt": f"What is {n} plus {n}?"} for n in range(12)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture
def configs(tiny_model: Path, prompts: Path) -> dict[str, Any]:
    model = str(tiny_model)
    return {
        "collect_traces": CollectTracesConfig(teacher=model, prompts_uri=str(prompts), max_new_tokens=32),
        "profile_kv": ProfileKvConfig(student_uri=model),
        "ingest_labels": IngestLabelsConfig(),
        "distill": DistillConfig(teacher=model, student_uri=model, validation_traces=2),
        "calibrate": CalibrateConfig(student_uri=model),
        "evaluate": EvaluateConfig(teacher=model, student_uri=model, windows=2, window_tokens=64),
    }


def changed(configs: dict[str, Any], stage: str, **values: Any) -> dict[str, Any]:
    return {**configs, stage: replace(configs[stage], **values)}


def with_model(configs: dict[str, Any], field: str, path: Path | str) -> dict[str, Any]:
    """The same teacher or student in every stage that has one."""
    return {
        stage: replace(config, **{field: str(path)}) if hasattr(config, field) else config
        for stage, config in configs.items()
    }


def test_good_inputs_pass_and_leave_the_store_empty(configs: dict[str, Any], store: Store) -> None:
    prompts, memory = preflight.check(configs, store)
    assert prompts.startswith("12 prompts, ")
    assert memory.startswith("distill: training needs about 0.")
    assert store.list() == []


@pytest.mark.parametrize("field", ["teacher", "student_uri"])
def test_a_missing_model(configs: dict[str, Any], store: Store, tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}: source .*nowhere.*no such file or folder"):
        preflight.check(with_model(configs, field, tmp_path / "nowhere"), store)


def test_more_memory_than_there_is_in_seconds(configs: dict[str, Any], store: Store) -> None:
    wanting = changed(configs, "distill", micro_batch_sequences=4_000_000, batch_sequences=4_000_000)
    with pytest.raises(ValueError, match=r"micro_batch_sequences 4000000, .* needs about \d+.* are available here"):
        preflight.check(wanting, store)
    with pytest.raises(ValueError, match=r"needs about 0\.\d GiB .* 0\.2 GiB distill\.memory_gib allows; take smaller"):
        preflight.check(changed(configs, "distill", memory_gib=0.2), store)
    assert preflight.check(wanting, store, weights=False)  # a check on another machine than the training's


def test_groups_that_do_not_fill_the_layers(configs: dict[str, Any], store: Store) -> None:
    with pytest.raises(ValueError, match=r"distill.group_size 48: must divide the 64 input channels of layers"):
        preflight.check(changed(configs, "distill", group_size=48), store)


def test_channels_that_cannot_be_equalised(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    """Layers that join q, k and v; and a checkpoint whose codes are of channels as they were."""
    joined = Path(shutil.copytree(tiny_model, tmp_path / "joined"))
    Phi3ForCausalLM(
        Phi3Config(
            vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
        )
    ).save_pretrained(joined)  # fmt: skip
    equalizing = changed(configs, "profile_kv", equalization_power=0.5)
    with pytest.raises(
        ValueError, match=r"profile_kv.equalization_power: .* no self_attn.q_proj, reflux cannot equalise"
    ):
        preflight.check(with_model(equalizing, "student_uri", joined), store)

    codes = tmp_path / "codes"
    write_tiny_bundle(codes, tiny_model, activation_bits=16)
    (codes / "quant_config.json").unlink()
    starting = changed(equalizing, "distill", start_uri=str(codes))
    with pytest.raises(ValueError, match=r"not rescaled as the profile's are; take profile_kv.equalization_power=0"):
        preflight.check(starting, store)
    assert preflight.check(changed(starting, "profile_kv", equalization_power=0.0), store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exceptions": ["down_in"]}, r"distill\.exceptions 'down_in': must be PATTERN=BITS"),
        ({"exceptions": ["down_proj=9"]}, r"distill\.exceptions 'down_proj=9': allowed are 2 to 8"),
        ({"exceptions": ["layers.7.*=8"]}, r"distill\.exceptions 'layers.7.\*=8': fits no layer of the model"),
        (
            {"exceptions": ["down_in=8"], "activation_bits": 16, "rollout_engine": "vllm"},
            r"distill\.exceptions \['down_in=8'\]: vLLM, the rollout_engine, does not round activations",
        ),
    ],
)
def test_exceptions_that_cannot_be(
    configs: dict[str, Any], store: Store, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        preflight.check(changed(configs, "distill", **options), store)


@pytest.mark.parametrize(("field", "value"), [("weight_bits", 99), ("activation_bits", 1), ("activation", "triple")])
def test_a_quantiser_that_does_not_exist(configs: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"distill.{field} .*{value}.*: allowed are"):
        changed(configs, "distill", **{field: value})


def test_a_folder_that_is_no_model(configs: dict[str, Any], store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").write_text("no model")
    with pytest.raises(ValueError, match=r"teacher: model .*empty/config.json: is missing"):
        preflight.check(with_model(configs, "teacher", tmp_path / "empty"), store)


@pytest.mark.parametrize("field", ["teacher", "student_uri"])
def test_a_model_without_weights_is_named_before_any_work(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path, field: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    who = field.removesuffix("_uri")
    with pytest.raises(ValueError, match=rf"{who}: model .*model: it has no weights; expected is model.safetensors"):
        preflight.check(with_model(configs, field, tmp_path / "model"), store)


def test_teacher_and_student_with_other_tokenizers(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(tiny_model, student)
    tokenizer = json.loads((student / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (student / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="do not share a tokenizer: 2 tokens"):
        preflight.check(with_model(configs, "student_uri", student), store)


def test_teacher_and_student_that_are_asked_differently(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    """distill would refuse the traces, after hours of collecting them."""
    student = tmp_path / "student"
    shutil.copytree(tiny_model, student)
    template = student / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    with pytest.raises(
        ValueError, match="teacher and student have different chat templates; give the student's folder"
    ):
        preflight.check(with_model(configs, "student_uri", student), store)


def test_fewer_rows_than_the_tokenizer_has_words(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    student = tmp_path / "student"
    shutil.copytree(tiny_model, student)
    described = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(described | {"vocab_size": 200}))
    with pytest.raises(ValueError, match="its vocabulary has 200 rows, the tokenizer 259 words"):
        preflight.check(with_model(configs, "student_uri", student), store)


def test_an_empty_prompts_file(configs: dict[str, Any], store: Store, prompts: Path) -> None:
    prompts.write_text("\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl: no usable prompt; it is empty"):
        preflight.check(configs, store)


def test_a_malformed_line_is_named_by_its_number(configs: dict[str, Any], store: Store, prompts: Path) -> None:
    lines = prompts.read_text().splitlines()
    lines[6] = lines[6][:-1]
    prompts.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"prompts\.jsonl, row 7: not a JSON object"):
        preflight.check(configs, store)


def test_a_prompt_longer_than_the_context_is_counted(configs: dict[str, Any], store: Store, prompts: Path) -> None:
    with prompts.open("a") as stream:
        stream.write(json.dumps({"prompt_id": "long", "prompt": "python3 " * 100}) + "\n")
    remarks = preflight.check(configs, store)
    assert any("1 prompts are set aside; the first, row 13: prompt: " in remark for remark in remarks)


def test_only_prompts_longer_than_the_context(configs: dict[str, Any], store: Store, prompts: Path) -> None:
    prompts.write_text(json.dumps({"prompt": "python3 " * 100}) + "\n")
    with pytest.raises(ValueError, match=r"no usable prompt; all 1 were rejected.*context"):
        preflight.check(configs, store)


def test_labels_for_unknown_prompts(configs: dict[str, Any], store: Store, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    configs = changed(configs, "ingest_labels", labels_uri=str(labels))
    labels.write_text("prompt_id,step,annotator,rating\nother,0,ann,3\n")
    with pytest.raises(ValueError, match=r"labels\.csv: no usable row; all 1 were .* prompt_id 'other': unknown"):
        preflight.check(configs, store)
    with labels.open("a") as stream:
        stream.write("p1,0,ann,3\n")
    remark = preflight.check(configs, store)[-1]
    assert remark.startswith("2 labels, 1 of them are set aside; the first, row 2: prompt_id 'other': unknown")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rating": 6}, "rating 6: must be a whole number from 1 to 5"),
        ({"rating": "good"}, "rating 'good': must be a whole number"),
        ({"step": 32}, "step 32: the trace can have 32 steps, counted from 0"),
        ({"annotator": ""}, "annotator: is missing"),
        ({"overload": "maybe"}, "overload 'maybe': must be true or false"),
        ({"prompt_id": None, "trace_id": "0" * 64}, "trace_id '000.*: unknown among 12 traces"),
        ({"rating": ...}, r"labels labels\.jsonl: no column rating; it has annotator, prompt_id, step"),
        ({"prompt_id": ...}, "no column prompt_id or trace_id; it has annotator, rating, step"),
    ],
)
def test_labels_of_which_none_can_be_used(
    configs: dict[str, Any], store: Store, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    rows = [{"prompt_id": f"p{n}", "step": 0, "annotator": "ann", "rating": 3} | values for n in range(3)]
    rows = [{name: value for name, value in row.items() if value is not ...} for row in rows]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        preflight.check(changed(configs, "ingest_labels", labels_uri=str(labels)), store)


def test_trace_ids_are_known_before_the_teacher_answers(
    configs: dict[str, Any], store: Store, tmp_path: Path, tiny_model: Path
) -> None:
    """Labels by the ids that collect_traces gave, and after a change of the sampling, which gives others."""
    config = configs["collect_traces"]
    writer = writer_for(tmp_path, "collect_traces", config)
    made = writer.commit(collect_traces.run(config, traces=writer)).table("traces", ["trace_id", "prompt_id"])
    rows = [{**row, "step": 0, "annotator": "ann", "rating": 3} for row in made.to_pylist()]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = changed(configs, "ingest_labels", labels_uri=str(labels))
    assert preflight.check(configs, store)[-1] == "12 labels"
    later = preflight.check(configs, store, weights=False)[-1]
    assert later == "12 labels, of which 12 name traces: they are compared when these are there"
    with pytest.raises(ValueError, match=r"labels\.jsonl: no usable row; .* unknown among 12 traces"):
        preflight.check(changed(configs, "collect_traces", seed=1), store)


def test_an_unreadable_labels_file(configs: dict[str, Any], store: Store, tmp_path: Path) -> None:
    labels = tmp_path / "labels.parquet"
    labels.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ValueError, match=r"labels\.parquet: not a readable Parquet file"):
        preflight.check(changed(configs, "ingest_labels", labels_uri=str(labels)), store)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00", "not a readable UTF-8 text"), (b"short", "are too few")]
)
def test_an_evaluation_text_that_cannot_be_used(
    configs: dict[str, Any], store: Store, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        preflight.check(changed(configs, "evaluate", eval_text_uri=str(tmp_path / "text.txt")), store)


@pytest.mark.parametrize(
    ("stage", "field", "value"),
    [
        ("collect_traces", "max_new_tokens", 512),
        ("profile_kv", "max_sequence_tokens", 513),
        ("distill", "max_sequence_tokens", 513),
        ("evaluate", "window_tokens", 513),
    ],
)
def test_lengths_beyond_the_context(configs: dict[str, Any], store: Store, stage: str, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{stage}\.{field} {value}: at most {512 - (stage == 'collect_traces')} fit"):
        preflight.check(changed(configs, stage, **{field: value}), store)


@pytest.mark.parametrize(
    ("stage", "values", "message"),
    [
        ("collect_traces", {"key_token_weights": [1.0]}, r"key-token weights \[1.0\]: one is needed for each of"),
        ("collect_traces", {"key_token_strategies": ["x", "y"]}, r"key-token strategies \['x', 'y'\]: allowed are"),
        ("distill", {"joint_policy_every": 2, "joint_student_lr": 0.0}, "in some steps of the joint phase neither"),
        ("distill", {"validate_every": 9, "max_steps": 8}, "validate_every 9: there are only 8 steps"),
        ("distill", {"validation_traces": 9}, "validation_traces 9: there are only 8 training prompts shorter than"),
        (
            "distill",
            {"max_sequence_tokens": 8, "rollout_new_tokens": 7},
            "there are only 0 training prompts shorter than .*max_sequence_tokens 8",
        ),
        (
            "evaluate",
            {"generation_tokens": 500},
            "evaluate.generation_tokens: 500 tokens after the prompt, the student's",
        ),
        ("evaluate", {"latency_tokens": 500}, r"evaluate.latency_tokens: 5\d\d tokens after the prompt"),
    ],
)
def test_what_would_stop_a_later_stage(
    configs: dict[str, Any], store: Store, stage: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        preflight.check(changed(configs, stage, **values), store)


def test_answers_that_outgrow_a_student_of_shorter_context(
    configs: dict[str, Any], store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    student = Path(shutil.copytree(tiny_model, tmp_path / "student"))
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    configs = with_model(configs, "student_uri", student)
    configs = changed(configs, "profile_kv", max_sequence_tokens=64)
    configs = changed(configs, "distill", max_sequence_tokens=64, rollout_new_tokens=32)
    configs = changed(configs, "evaluate", generation_tokens=8, latency_tokens=20)
    assert preflight.check(configs, store)
    with pytest.raises(ValueError, match=r"max_new_tokens 100: after the longest prompt, \d+ tokens, .* context, 128"):
        preflight.check(changed(configs, "collect_traces", max_new_tokens=100), store)


def test_more_entries_per_token_than_the_vocabulary_has(configs: dict[str, Any], store: Store) -> None:
    with pytest.raises(ValueError, match=r"top_k 4000: the teacher's vocabulary has 259"):
        preflight.check(changed(configs, "collect_traces", top_k=4000), store)


def test_an_unwritable_store_is_refused_first(configs: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store.open(str(tmp_path / "file" / "store"))
    with pytest.raises((StoreError, ValueError), match=str(tmp_path / "file")):
        preflight.check(with_model(configs, "teacher", "nowhere"), store)


def test_an_export_of_a_tool_is_checked_as_the_stage_will_read_it(
    configs: dict[str, Any], store: Store, tmp_path: Path
) -> None:
    """Answers are still to be given, so what their text decides is left to the stage."""
    labels = tmp_path / "export.json"
    result = {"from_name": "rating_1", "to_name": "step_1", "type": "rating", "value": {"rating": 4}}
    person = {"completed_by": 1, "created_at": "2026-03-09T10:00:00Z", "result": [result]}
    data = {"trace_id": "collected in another way", "prompt_id": "p1", "steps": [{"text": "One."}, {"text": "Two."}]}
    tasks = [{"data": data, "annotations": [person, person | {"was_cancelled": True}]}]
    labels.write_text(json.dumps(tasks))
    configs = changed(configs, "ingest_labels", labels_uri=str(labels))
    remark = preflight.check(configs, store)[-1]
    assert remark == "2 labels, 1 of them are set aside; the first, row 1: annotation: the annotator skipped the task"
    tasks[0]["annotations"] = []
    labels.write_text(json.dumps(tasks))
    with pytest.raises(ValueError, match=r"labels export\.json: no usable row; it is empty"):
        preflight.check(configs, store)


def test_a_served_teacher_is_asked_before_any_work(configs: dict[str, Any], store: Store, tiny_model: Path) -> None:
    with openai_server.running(tiny_model, "tiny-r1", max_logprobs=32) as server:
        served = {
            "answered_by": ["tiny-r1"], "server_urls": [server.url], "key_token_strategies": ["confidence"],
            "key_token_weights": [1.0], "key_token_temperature": 1.0,
        }  # fmt: skip
        preflight.check(changed(configs, "collect_traces", **served), store)
        assert [body["max_tokens"] for body in server.bodies] == [1, 1]
        with pytest.raises(ValueError, match=r"answered_by 'tiny-r2': not served at .*; did you mean tiny-r1"):
            preflight.check(changed(configs, "collect_traces", **(served | {"answered_by": ["tiny-r2"]})), store)
        with pytest.raises(ValueError, match=r"HTTP 400: .*max allowed: 32"):
            preflight.check(changed(configs, "collect_traces", **(served | {"top_k": 40})), store)
    assert store.list() == []
