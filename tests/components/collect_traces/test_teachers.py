"""Teachers behind a server: the same traces as in this process, faults survived, and nothing believed unchecked."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import openai_server
from servers.openai_server import Fault, OpenAIServer
from stage_writers import writer_for

from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt, load_prompts
from reflux.components.collect_traces.stage import run
from reflux.components.collect_traces.teachers.pace import Pace
from reflux.components.collect_traces.teachers.server import configured_servers, server_teacher
from reflux.components.models import load_tokenizer

PROMPTS = [{"prompt_id": f"p{i}", "prompt": f"Tell me about {i} " + "grains " * i} for i in range(9)]
SERVED = {
    "answered_by": ["tiny"], "key_token_strategies": ["confidence"], "key_token_weights": [1.0],
    "key_token_temperature": 1.0, "max_new_tokens": 12, "batch_size": 4, "top_k": 7, "server_concurrency": 3,
    "server_timeout_s": 30.0,
}  # fmt: skip
LOCAL = {**SERVED, "answered_by": ["local"]}
PROBES = 2

Collect = Callable[..., Artifact]


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Iterator[OpenAIServer]:
    with openai_server.running(tiny_model) as server:
        yield server


@pytest.fixture
def server(started: OpenAIServer) -> OpenAIServer:
    """The running server as it was at first."""
    fresh = OpenAIServer(model_name="tiny", url=started.url)
    started.__dict__.update(fresh.__dict__)
    return started


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


@pytest.fixture
def collect(tiny_model: Path, tmp_path: Path, prompts_file: Path, server: OpenAIServer) -> Collect:
    def collect(*, store: str = "store", commit: bool = True, **options: Any) -> Artifact:
        options = SERVED | {"server_urls": [server.url]} | options
        if options["answered_by"] == ["local"]:
            options["server_urls"] = []
        config = CollectTracesConfig(teacher=str(tiny_model), prompts_uri=str(prompts_file), **options)
        writer = writer_for(tmp_path / store, "collect_traces", config)
        metrics = run(config, traces=writer)
        return writer.commit(metrics) if commit else None  # type: ignore[return-value]

    return collect


def rows_of(traces: Artifact) -> dict[str, dict[str, Any]]:
    return {row["prompt_id"]: row for row in traces.table("traces").to_pylist()}


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}])
def test_a_served_model_gives_the_traces_of_the_same_model_in_process(
    collect: Collect, server: OpenAIServer, api: str, sampling: dict[str, Any]
) -> None:
    here = collect(store="here", **(LOCAL | sampling))
    there = collect(store="there", server_api=api, **sampling)
    ours, theirs = rows_of(here), rows_of(there)
    assert ours.keys() == theirs.keys() == {prompt["prompt_id"] for prompt in PROMPTS}
    for prompt_id, mine in ours.items():
        row = theirs[prompt_id]
        for name in ("prompt_token_ids", "response_token_ids", "response", "step_starts", "stop_reason", "split"):
            assert row[name] == mine[name], name
        assert row["topk_token_ids"] == mine["topk_token_ids"]
        for name, tolerance in (("topk_logprobs", 4e-3), ("tail_logmass", 1e-4), ("key_token_score", 1e-5)):
            torch.testing.assert_close(torch.tensor(row[name]), torch.tensor(mine[name]), atol=tolerance, rtol=0)
        assert (row["teacher_id"], row["trace_id"]) != (mine["teacher_id"], mine["trace_id"])
        assert all(b < w + 1e-5 for b, w in zip(row["entropy_nats"], mine["entropy_nats"], strict=True))
    assert {row["teacher_id"] for row in theirs.values()} == {"tiny"}
    assert json.loads(there.schema_metadata("traces")["entropy_of"]) == {"tiny": "buckets"}
    assert set(json.loads(here.schema_metadata("traces")["entropy_of"]).values()) == {"vocabulary"}
    assert len(server.bodies) == len(PROMPTS) + PROBES


def test_the_entropy_of_a_server_is_that_of_the_buckets(collect: Collect) -> None:
    for row in rows_of(collect()).values():
        logprobs_TB = torch.cat(
            [torch.tensor(row["topk_logprobs"]), torch.tensor(row["tail_logmass"])[:, None]], dim=-1
        )
        expected_T = -(logprobs_TB.exp() * logprobs_TB).sum(-1)
        torch.testing.assert_close(torch.tensor(row["entropy_nats"]), expected_T, atol=4e-3, rtol=0)


def test_faults_of_the_moment_change_nothing(collect: Collect, server: OpenAIServer) -> None:
    undisturbed = collect(store="undisturbed")
    calls = len(server.bodies)
    faults = [
        Fault(status=429, headers={"Retry-After": "0.2"}),
        Fault(status=500),
        Fault(status=503, body="<html>busy</html>"),
        Fault(cut_after=0),
        Fault(cut_after=100),
        Fault(delay_s=4.0),
    ]
    server.faults.extend([faults[0], Fault(), Fault(), *faults])  # the first probe, then the prompts
    disturbed = collect(store="disturbed", server_timeout_s=2.0)
    assert disturbed.digest == undisturbed.digest
    assert len(server.bodies) == 2 * calls + 1 + len(faults)


def test_a_server_that_says_when_is_asked_then(collect: Collect, server: OpenAIServer) -> None:
    server.faults.append(Fault(status=429, headers={"Retry-After": "1.5"}))
    collect()
    assert server.started_s[1] - server.started_s[0] >= 1.5


def test_a_server_that_stays_away_ends_the_stage_as_something_that_may_pass(
    collect: Collect, server: OpenAIServer
) -> None:
    server.always = Fault(status=503)
    with pytest.raises(ConnectionError, match=r"no answer after 2 attempts, the last ended in HTTP 503: told to fail"):
        collect(server_retries=1)
    server.always = Fault(status=429, headers={"Retry-After": "7200"})
    with pytest.raises(ConnectionError, match="asks to come back in 7200 s"):
        collect()
    with pytest.raises(ConnectionError, match="no answer after 1 attempts, the last ended in ConnectError"):
        collect(server_retries=0, server_urls=["http://127.0.0.1:9/v1"])


@pytest.mark.parametrize(
    ("configured", "options", "message"),
    [
        ({"max_logprobs": 5}, {}, "teacher 'tiny', prompt 'p0': .*refuses the request, HTTP 400: .*max allowed: 5"),
        ({"ids": False}, {}, "names a token by its text, .* ids are needed"),
        ({"shifted_ids": 1}, {}, "tokens are .* to our tokenizer and .* to the server"),
        ({"shifted_ids": 300}, {}, "is not among the 259 of our tokenizer"),
        ({"prompt_prefix": [1]}, {}, r"saw a prompt of \d+ tokens, ours has \d+ and they differ from token 1 on"),
        ({"prompt_prefix": [1]}, {"server_api": "chat"}, r"saw a prompt of \d+ tokens, ours has"),
        ({"after_sampling": True}, {}, "nats apart at two temperatures: the server reports probabilities after"),
        ({"max_model_len": 90}, {}, r"max_new_tokens 12: longest prompt and answer take \d+ tokens, .* room for 90"),
        ({"model_name": "tiny-2"}, {}, "answered_by 'tiny': not served at http.*; did you mean tiny-2"),
        ({"key": "right"}, {}, "HTTP 401: the key is wrong"),
        ({"always": Fault(status=200, body="<html>login</html>")}, {}, "its answer is not JSON: <html>login"),
        ({"always": Fault(status=200, body="{}")}, {}, "not of the form of the completions API"),
    ],
)
def test_what_a_server_must_not_do_is_named(
    collect: Collect, server: OpenAIServer, configured: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    server.__dict__.update(configured)
    with pytest.raises(ValueError, match=message):
        collect(**options)


def test_a_key_is_used_and_written_nowhere(
    collect: Collect, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    server.key = "not-to-be-seen"
    with pytest.raises(ValueError, match="server_key_variables 'REFLUX_TINY_KEY': the environment has no such"):
        collect(server_key_variables=["REFLUX_TINY_KEY"])
    monkeypatch.setenv("REFLUX_TINY_KEY", server.key)
    traces = collect(server_key_variables=["REFLUX_TINY_KEY"])
    assert len(rows_of(traces)) == len(PROMPTS)
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"REFLUX_TINY_KEY" in content for content in written)
    assert not any(server.key.encode() in content for content in written)
    assert server.key not in capsys.readouterr().out


def test_only_so_many_are_asked_and_read_ahead(server: OpenAIServer, tiny_model: Path, prompts_file: Path) -> None:
    config = CollectTracesConfig(
        teacher=str(tiny_model), prompts_uri=str(prompts_file), server_urls=[server.url], **SERVED
    )
    tokenizer = load_tokenizer(tiny_model)
    prompts, _ = load_prompts(
        prompts_file, tokenizer, heldout_fraction=0.2, max_prompt_tokens=512, max_total_tokens=500
    )
    read: list[str] = []

    def noted() -> Iterator[Prompt]:
        for prompt in prompts * 5:
            read.append(prompt.prompt_id)
            yield prompt

    server.always = Fault(delay_s=0.02)
    (there,) = configured_servers(config)
    with closing(server_teacher(there, tokenizer, config).answers(noted())) as answers:
        first = next(answers)
        time.sleep(0.5)  # whoever reads slowly is waited for
        assert len(read) == len(server.bodies) == 2 * config.server_concurrency
        order = [first.prompt.prompt_id, *(next(answers).prompt.prompt_id for _ in range(20))]
    assert order == read[:21]
    assert server.most_at_once == config.server_concurrency


def test_after_a_refusal_no_more_is_asked(collect: Collect, server: OpenAIServer) -> None:
    server.faults.extend([Fault()] * PROBES)
    server.always = Fault(status=422)
    with pytest.raises(ValueError, match="HTTP 422: told to fail"):
        collect(batch_size=9)
    assert len(server.bodies) <= PROBES + 2 * SERVED["server_concurrency"]  # type: ignore[operator]


def test_a_pace_spreads_what_it_is_asked_for_and_forgives_what_was_not_used() -> None:
    pace = Pace(per_minute=600)
    waits = [pace.take() for _ in range(4)]
    assert waits == pytest.approx([0, 0.1, 0.2, 0.3], abs=0.05)
    assert pace.take(10) == pytest.approx(0.4, abs=0.05)
    pace.give_back(8)
    assert pace.take() == pytest.approx(0.6, abs=0.05)
    assert [Pace(0).take(1e9) for _ in range(3)] == [0, 0, 0]


def test_requests_and_tokens_keep_to_their_limits(collect: Collect, server: OpenAIServer) -> None:
    collect(server_requests_per_minute=1200.0, batch_size=9)  # one in 50 ms
    starts = server.started_s
    assert starts[-1] - starts[0] >= 0.05 * (len(starts) - 2)
    server.started_s.clear()
    rows = rows_of(collect(store="tokens", server_tokens_per_minute=60_000.0, batch_size=9))  # one in 1 ms
    used = sum(len(row["prompt_token_ids"]) + len(row["response_token_ids"]) for row in rows.values())
    last = max(len(row["prompt_token_ids"]) + SERVED["max_new_tokens"] for row in rows.values())  # type: ignore[operator]
    assert server.started_s[-1] - server.started_s[PROBES] >= 1e-3 * (used - last) * 0.9


def test_a_second_attempt_asks_for_the_missing_shard_alone(
    collect: Collect, server: OpenAIServer, tmp_path: Path
) -> None:
    whole = collect(store="whole")
    collect(store="part", commit=False)
    next((tmp_path / "part").rglob("pending/traces/00001.json")).unlink()
    server.bodies.clear()
    assert collect(store="part").digest == whole.digest
    assert len(server.bodies) == PROBES + SERVED["batch_size"]  # type: ignore[operator]
    collect(store="done", commit=False)
    assert collect(store="done", server_urls=["http://127.0.0.1:9/v1"]).digest == whole.digest  # nobody is asked


def test_several_teachers_answer_every_prompt(
    collect: Collect, server: OpenAIServer, tiny_model: Path, tmp_path: Path
) -> None:
    with openai_server.running(tiny_model, "other") as second:
        traces = collect(answered_by=["tiny", "local", "other"], server_urls=[server.url, second.url], temperature=0.0)
        assert (len(server.bodies), len(second.bodies)) == (len(PROMPTS) + PROBES,) * 2
    rows = traces.table("traces").to_pylist()
    digest = traces.schema_metadata("traces")["teacher_digest"]
    assert Counter(row["teacher_id"] for row in rows) == dict.fromkeys(("tiny", digest, "other"), len(PROMPTS))
    assert len({row["trace_id"] for row in rows}) == len(rows)
    answers = {(row["prompt_id"], tuple(row["response_token_ids"])) for row in rows}
    assert len(answers) == len(PROMPTS)  # all three are the same model, at temperature 0
    assert (traces.metrics["prompts"], traces.metrics["answers"]) == (len(PROMPTS), 3 * len(PROMPTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answered_by": []}, r"answered_by \[\]: name local or served models, each once"),
        ({"answered_by": ["a", "a"]}, "each once"),
        ({"answered_by": ["a", " "]}, "each once"),
        ({"server_urls": []}, "server_urls: 0 are given for 1 served teachers"),
        ({"server_urls": ["http://a/v1", "http://b/v1"]}, "server_urls: 2 are given for 1"),
        ({"answered_by": ["local"]}, "server_urls: 1 are given for 0 served teachers"),
        ({"server_urls": ["host:8000/v1"]}, r"must be http\(s\)://host"),
        ({"server_urls": ["http://me:hush@host/v1"]}, "the one at host must be .* without user"),
        ({"server_urls": ["http://host/v1?key=hush"]}, "the one at host must be .* without user"),
        ({"server_key_variables": ["sk-hush"]}, "holds something that is no name of an environment variable"),
        ({"server_key_variables": ["A", "B"]}, "server_key_variables: 2 are given for 1"),
        ({"server_api": "grpc"}, "server_api 'grpc': allowed are completions, chat"),
        ({"server_concurrency": 0}, "server_concurrency 0"),
        ({"server_retries": -1}, "server_retries -1"),
        ({"server_timeout_s": 0.0}, "server_timeout_s 0.0"),
        ({"server_requests_per_minute": -1.0}, "server_requests_per_minute -1.0"),
        ({"server_tokens_per_minute": float("inf")}, "server_tokens_per_minute inf"),
        ({"key_token_strategies": ["entropy"]}, r"key_token_strategies \['entropy'\]: a server does not give"),
        ({"key_token_temperature": 1.5}, r"key_token_temperature 1\.5: a server does not give"),
        ({"state_layers": [1]}, r"state_layers \[1\]: a server does not give"),
        ({"attention_layers": [0]}, r"attention_layers \[0\]: a server does not give"),
        ({"trace_store": "sampled"}, "trace_store 'sampled': a server does not give"),
    ],
)
def test_what_cannot_be_had_from_a_server_is_refused_by_the_configuration(
    options: dict[str, Any], message: str
) -> None:
    config = SERVED | {"server_urls": ["http://host:8000/v1"]} | options
    with pytest.raises(ValueError, match=message) as refused:
        CollectTracesConfig(teacher="model", prompts_uri="prompts.jsonl", **config)
    assert "hush" not in str(refused.value)
