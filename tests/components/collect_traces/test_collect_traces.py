"""collect_traces on the tiny model: stored numbers against teacher-forced forwards, refused input, and kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_writers import writer_for

from reflux.components import progress
from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import load_prompts, split_of
from reflux.components.collect_traces.stage import run
from reflux.components.collect_traces.steps import step_starts, token_pieces
from reflux.components.models import load_model, load_tokenizer
from reflux.components.schemas import traces_topk
from reflux.components.sources import fetch

PROMPTS: list[dict[str, Any]] = [
    {"prompt_id": f"p{i}", "dimension": ("multi_hop", "trivial")[i % 2], "prompt": "Tell me about " + "sand " * i}
    for i in range(9)
]  # p0 and p7 are held out


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def collect(tiny_model: Path, tmp_path: Path) -> Callable[..., Artifact]:
    def collect(prompts_uri: Path, *, store: str = "store", **options: Any) -> Artifact:
        config = CollectTracesConfig(
            teacher=str(tiny_model), prompts_uri=str(prompts_uri), **{"max_new_tokens": 12, "batch_size": 4} | options
        )
        writer = writer_for(tmp_path / store, "collect_traces", config)
        return writer.commit(run(config, traces=writer))

    return collect


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_stored_distributions_are_those_of_a_teacher_forced_forward(
    collect: Callable[..., Artifact], prompts_file: Path, tiny_model: Path
) -> None:
    traces = collect(prompts_file, top_k=7)
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    rows = traces.table("traces").to_pylist()
    assert {row["prompt_id"] for row in rows} == {prompt["prompt_id"] for prompt in PROMPTS}
    assert len({row["trace_id"] for row in rows}) == len(PROMPTS)
    for row in rows:
        prompt, answer = row["prompt_token_ids"], row["response_token_ids"]
        logits_TV = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1, : len(tokenizer)]
        logprobs_TV = logits_TV.log_softmax(-1)
        stored_TK = torch.tensor(row["topk_logprobs"])
        expected_TK, _ = logprobs_TV.topk(7)
        torch.testing.assert_close(stored_TK, expected_TK, atol=3e-3, rtol=0)  # float16 between 4 and 8 nats
        at_ids_TK = logprobs_TV.gather(1, torch.tensor(row["topk_token_ids"]))
        torch.testing.assert_close(stored_TK, at_ids_TK, atol=3e-3, rtol=0)
        mass_T = stored_TK.exp().sum(-1) + torch.tensor(row["tail_logmass"]).exp()
        torch.testing.assert_close(mass_T, torch.ones(len(answer)), atol=2e-3, rtol=0)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        torch.testing.assert_close(torch.tensor(row["entropy_nats"]), entropy_T, atol=1e-3, rtol=0)
        assert all(0 <= score <= 1 for score in row["key_token_score"])
        assert row["step_starts"][0] == 0
        assert row["response"] == tokenizer.decode(answer, skip_special_tokens=True)
        assert row["split"] == split_of(row["prompt_id"], 0.2)


def test_shards_schema_provenance_and_metrics(collect: Callable[..., Artifact], prompts_file: Path) -> None:
    traces = collect(prompts_file, top_k=5, seed=3)
    assert [(shard.name, shard.rows) for shard in traces.shards("traces")] == [
        ("traces/00000", 4), ("traces/00001", 4), ("traces/00002", 1),
    ]  # fmt: skip
    table = traces.table("traces")
    assert table.schema.equals(traces_topk(5, 259))
    lengths = [len(ids) for ids in table["prompt_token_ids"].to_pylist()]
    assert lengths == sorted(lengths)
    provenance = traces.schema_metadata("traces")
    expected = {"vocab_size": "259", "top_k": "5", "trace_store": "topk", "scored_temperature": "1.0", "seed": "3"}
    assert expected.items() <= provenance.items()
    assert re.fullmatch("sha256:[0-9a-f]{64}", provenance["teacher_digest"])
    tokens = sum(len(ids) for ids in table["response_token_ids"].to_pylist())
    assert (traces.metrics["prompts"], traces.metrics["heldout_prompts"]) == (9, 2)
    assert (traces.metrics["tokens"], traces.metrics["rejected"]) == (tokens, 0)
    assert 0 < traces.metrics["tail_mass_mean"] < 1
    assert traces.metrics["tokens_per_second"] > 0


def test_equal_work_gives_an_equal_digest_and_another_seed_another(
    collect: Callable[..., Artifact], prompts_file: Path, tmp_path: Path
) -> None:
    first = collect(prompts_file, store="a")
    moved = tmp_path / "python3 elsewhere"
    moved.mkdir()
    again = collect(prompts_file.rename(moved / "other name.jsonl"), store="b", device="cpu")
    other_seed = collect(moved / "other name.jsonl", store="b", seed=1)
    assert first.digest == again.digest
    assert other_seed.digest != first.digest
    assert other_seed.table("traces")["response"] != first.table("traces")["response"]


def test_an_answer_depends_on_its_prompt_alone(
    collect: Callable[..., Artifact], prompts_file: Path, tmp_path: Path
) -> None:
    def answers(traces: Artifact) -> dict[str, str]:
        rows = traces.table("traces", columns=["trace_id", "prompt_id", "response"]).to_pylist()
        return {row["trace_id"]: row["response"] for row in rows}

    fewer = written(tmp_path / "fewer.jsonl", PROMPTS[::-1][:6])
    everything, part = answers(collect(prompts_file)), answers(collect(fewer))
    assert part.items() <= everything.items()


def test_the_sampling_contract_is_recorded_and_kept(
    collect: Callable[..., Artifact], prompts_file: Path, tiny_model: Path
) -> None:
    """What was drawn can be drawn again from what the artifact says: no batch and no other prompt has a part in it."""
    contract = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "max_new_tokens": 20}
    by_size = {size: collect(prompts_file, batch_size=size, **contract) for size in (1, 4, 9)}
    rows = {size: traces.table("traces").sort_by("trace_id").to_pylist() for size, traces in by_size.items()}
    assert contract.items() <= by_size[4].config.items()
    recorded = by_size[4].schema_metadata("traces")
    names = ("sampled_temperature", "sampled_top_p", "seed", "max_new_tokens", "scored_temperature")
    assert [recorded[name] for name in names] == ["0.9", "0.8", "5", "20", "1.0"]
    drawn = ("trace_id", "response_token_ids", "stop_reason")
    for size in (1, 9):
        assert [[row[name] for name in drawn] for row in rows[size]] == [
            [row[name] for name in drawn] for row in rows[4]
        ]
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    for row in rows[4]:
        (alone,) = rollout(
            model,
            [
                Request(
                    prompt_token_ids=row["prompt_token_ids"],
                    seed=derive_seed(int(recorded["seed"]), row["prompt_id"]),
                )
            ],
            Sampling(
                temperature=float(recorded["sampled_temperature"]),
                top_p=float(recorded["sampled_top_p"]),
                max_new_tokens=int(recorded["max_new_tokens"]),
            ),
            eos_token_id=tokenizer.eos_token_id,
            vocab_size=int(recorded["vocab_size"]),
        )
        assert alone.response_token_ids == row["response_token_ids"]


def test_what_is_known_of_a_prompt_and_an_answer_stands_with_the_trace(
    collect: Callable[..., Artifact], tmp_path: Path
) -> None:
    marked = {
        "prompt_id": "marked",
        "prompt": "Zuerst kam das [ANCHOR]Fieber[/ANCHOR], dann der Ausschlag auf der Haut.",
    }
    prompts = written(tmp_path / "prompts.jsonl", [*PROMPTS, marked])
    traces = collect(prompts, max_new_tokens=40, temperature=0.0)  # greedy: an untrained model soon repeats itself
    rows = {row["prompt_id"]: row for row in traces.table("traces").to_pylist()}
    assert rows["marked"]["prompt"] == "Zuerst kam das Fieber, dann der Ausschlag auf der Haut."
    ((first, end),) = rows["marked"]["anchor_spans"]
    assert rows["marked"]["language"] == "de"
    assert {row["entity_count"] for row in rows.values()} == {None}
    assert all(row["anchor_spans"] == [] for name, row in rows.items() if name != "marked")
    assert end - first == len("Fieber")  # a byte is a token
    loops = [ends_in_loop(row["response_token_ids"]) for row in rows.values()]
    assert [row["ends_in_loop"] for row in rows.values()] == loops
    assert traces.metrics["loop_share"] == sum(loops) / len(loops) > 0
    assert traces.metrics["length_share"] + traces.metrics["eos_share"] == 1
    assert traces.metrics["anchored_prompts"] == 1
    assert traces.schema_metadata("traces")["language_detector"].startswith("py3langid ")


def test_as_many_prompts_are_asked_as_the_configuration_says(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    rows = [
        {"prompt_id": f"{dimension}{i}", "dimension": dimension, "prompt": f"{dimension} {i}"}
        for dimension in ("multi_hop", "tool_use", "trivial")
        for i in range(12)
    ]
    prompts = written(tmp_path / "prompts.jsonl", rows)
    traces = collect(prompts, prompts_per_dimension=9, heldout_fraction=0.3, max_new_tokens=3)
    assert Counter(traces.table("traces")["dimension"].to_pylist()) == {"multi_hop": 9, "tool_use": 9, "trivial": 2}
    table = traces.table("composition").to_pylist()
    assert [(row["dimension"], row["usable"], row["asked"]) for row in table] == [
        ("multi_hop", 12, 9), ("tool_use", 12, 9), ("trivial", 12, 2),
    ]  # fmt: skip
    assert sum(row["heldout"] for row in table) == traces.metrics["heldout_prompts"]
    assert traces.metrics["share_trivial"] == pytest.approx(0.1)
    assert traces.metrics["prompts"] == 20
    assert traces.metrics["rejected"] == 0
    reordered = collect(written(tmp_path / "other.jsonl", rows[::-1]), store="other", prompts_per_dimension=9,
                        heldout_fraction=0.3, max_new_tokens=3)  # fmt: skip
    assert reordered.table("traces").equals(traces.table("traces"))


def test_a_second_attempt_makes_only_the_missing_shards(
    collect: Callable[..., Artifact], prompts_file: Path, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    whole = collect(prompts_file, store="whole")
    config = CollectTracesConfig(
        teacher=str(tiny_model), prompts_uri=str(prompts_file), max_new_tokens=12, batch_size=4
    )
    run(config, traces=writer_for(tmp_path / "part", "collect_traces", config))  # an attempt that never commits
    shard = next((tmp_path / "part").rglob("pending/traces/00001.json"))
    shard.unlink()
    capsys.readouterr()
    resumed = collect(prompts_file, store="part")
    assert capsys.readouterr().out.startswith("progress  55 %  5/9 prompts")
    assert resumed.digest == whole.digest
    assert {**resumed.metrics, "tokens_per_second": 0} == {**whole.metrics, "tokens_per_second": 0}


def test_refused_prompts_are_kept_with_their_reason(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt_id": "p0", "prompt": "again"},
        {"prompt_id": "long", "prompt": "x" * 300},
        {"prompt": "  "},
        {"prompt_id": "none"},
        {"prompt_id": ["p"], "prompt": "a list as id"},
    ]
    traces = collect(written(tmp_path / "prompts.jsonl", [*PROMPTS, *bad]), max_prompt_tokens=200)
    rejected = traces.table("rejected").to_pylist()
    assert [row["row"] for row in rejected] == [10, 11, 12, 13, 14]
    for row, reason in zip(
        rejected,
        ["prompt_id 'p0': already used in prompts.jsonl, row 1", r"prompt: 3\d\d tokens .*max_prompt_tokens is 200",
         "prompt '  ': must be a text", "prompt: is missing", r"prompt_id \['p'\]: must be text"], strict=True,
    ):  # fmt: skip
        assert re.search(reason, row["reason"])
    assert traces.metrics["rejected"] == 5
    assert traces.metrics["prompts"] == 9


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused(
    collect: Callable[..., Artifact], tmp_path: Path
) -> None:
    prompts = [*PROMPTS, {"prompt_id": "long", "prompt": "x" * 400}]  # the tiny model's context is 512
    traces = collect(written(tmp_path / "prompts.jsonl", prompts), max_new_tokens=100)
    (row,) = traces.table("rejected").to_pylist()
    assert "the teacher's context leaves 412" in row["reason"]


def test_prompts_without_ids_and_dimensions_get_them(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    texts = [{"prompt": f"Count to {i}."} for i in range(12)]
    rows = collect(written(tmp_path / "prompts.jsonl", texts)).table("traces").to_pylist()
    assert {len(row["prompt_id"]) for row in rows} == {64}
    assert {row["dimension"] for row in rows} == {"unspecified"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts.jsonl: no usable prompt; it is empty"),
        ("\n\n", "no usable prompt; it is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "prompts.jsonl, row 2: not a JSON object"),
        ('{"prompt": 5}\n', "all 1 were rejected, the first for prompt 5: must be a text"),
        ('{"prompt": "a", "prompt_id": "p4"}\n', r"heldout_fraction 0\.2 holds out 0 of 1 prompts"),
        ('{"prompt": "a", "prompt_id": "p0"}\n', r"heldout_fraction 0\.2 holds out 1 of 1 prompts"),
    ],
)
def test_files_without_usable_prompts_are_refused(
    content: str, message: str, collect: Callable[..., Artifact], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        collect(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trace_store": "dense"}, "trace_store 'dense': allowed are topk, sampled"),
        ({"top_k": 300}, "top_k 300: the teacher's vocabulary has 259"),
        ({"top_k": 0}, "top_k 0: must be at least 1"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"heldout_fraction": 1.0}, "heldout_fraction 1.0"),
        ({"prompts_per_dimension": -1}, "prompts_per_dimension -1"),
        ({"trivial_share": 1.0}, "trivial_share 1.0"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"key_token_strategies": ["luck"], "key_token_weights": [1.0]}, "luck"),
        ({"key_token_temperature": 0.0}, "key_token_temperature 0.0"),
        ({"key_token_threshold": 2.0}, "key_token_threshold 2.0"),
    ],
)
def test_a_bad_configuration_is_named(
    options: dict[str, Any], message: str, collect: Callable[..., Artifact], prompts_file: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        collect(prompts_file, **options)


def test_a_teacher_and_prompts_must_be_named() -> None:
    with pytest.raises(ValueError, match="teacher: is empty"):
        CollectTracesConfig(prompts_uri="builtin:demo_prompts.jsonl")
    with pytest.raises(ValueError, match="prompts_uri: is empty"):
        CollectTracesConfig(teacher="some/model")


def test_the_demo_prompts_cover_every_dimension_on_both_sides(tiny_model: Path) -> None:
    prompts, rejected = load_prompts(
        fetch("builtin:demo_prompts.jsonl"),
        load_tokenizer(tiny_model),
        heldout_fraction=0.2,
        max_prompt_tokens=512,  # bytes
        max_total_tokens=512,
    )
    assert rejected == []
    sizes = Counter((prompt.dimension, prompt.split) for prompt in prompts)
    for dimension in ("multi_hop", "tool_use", "uncertainty", "long_range", "value_alignment"):
        assert sizes[dimension, "train"] + sizes[dimension, "heldout"] == 40
        assert sizes[dimension, "heldout"] >= 3
    assert sizes["trivial", "train"] + sizes["trivial", "heldout"] == 20
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_pieces_join_to_the_text_and_hold_back_half_characters(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = "Grüße 你好! Ok."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, [*ids, tokenizer.eos_token_id])
    assert len(pieces) == len(ids) + 1
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@pytest.mark.parametrize(
    "steps",
    [
        ["No boundary at all"],
        ["First sentence. ", "Second one! ", "Third?"],
        ["One line\n", "another line\n\n", "and a third"],
        ["1. Take e.g. two apples. ", "2. Eat them (slowly.) ", "Done... ", "Really."],
        ["Pi is 3.14 and no end. ", "Version 2.0 follows."],
        ["第一句。", "第二句！", "完"],  # noqa: RUF001
        [""],
    ],
)
def test_steps_are_sentences_and_lines(steps: list[str]) -> None:
    text = "".join(steps)
    starts = step_starts(list(text) or [""])  # one token per character: offsets are easy to see
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == steps


def test_two_steps_that_begin_in_one_token_are_one() -> None:
    assert step_starts(["Yes. No. ", "Maybe."]) == [0, 1]
    assert step_starts(["Yes", ".", " No", ".", ""]) == [0, 2]


def test_killed_between_shards_and_called_again_it_ends_with_the_same_digest(
    collect: Callable[..., Artifact], tiny_model: Path, tmp_path: Path
) -> None:
    prompts = written(
        tmp_path / "prompts.jsonl",
        [{"prompt_id": f"p{i}", "prompt": f"Say {i} again and again."} for i in range(24)],
    )
    command = [sys.executable, "-m", "reflux.components", "collect_traces", "--store", str(tmp_path / "killed"),
               "--run", "kill", "--teacher", str(tiny_model), "--prompts-uri", str(prompts), "--batch-size", "1",
               "--max-new-tokens", "60", "--out-traces", str(tmp_path / "traces.json")]  # fmt: skip
    environment = os.environ | {"MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1", "REFLUX_PROGRESS": "json"}

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout is not None
        next(line for line in killed.stdout if (seen := progress.parse(line)) and seen.done >= 3)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "traces.json").exists()
    assert 3 <= len(list((tmp_path / "killed").rglob("pending/traces/*.json"))) < 24

    resumed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert '"done": 0' not in resumed.stdout
    never_killed = collect(prompts, batch_size=1, max_new_tokens=60)
    assert resumed.stdout.endswith(f"{never_killed.digest}\n")
