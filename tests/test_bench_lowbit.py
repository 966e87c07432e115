"""The table of low-bit students on the tiny model: one row from nothing, then what a later call finds kept."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from reflux.components.models import load_model, load_tokenizer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = {"windows": 2, "window_tokens": 24, "answers": 3, "latency_tokens": 4}


@pytest.fixture
def lowbit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("REFLUX_DATA", "")
    return importlib.import_module("lowbit")


def run(lowbit: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    out = Path(options[options.index("--out") + 1])
    monkeypatch.setattr(sys, "argv", ["lowbit.py", "--sizes", json.dumps(SMALL), "--threads", "1", *options])
    lowbit.main()
    return json.loads(out.read_text())


@pytest.mark.slow
def test_rows_are_kept_and_what_cannot_be_made_says_why(
    lowbit: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    common = ("--model", str(tiny_model), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out.json"),
              "--venv", str(tmp_path / "venv"))  # fmt: skip
    first = run(lowbit, monkeypatch, *common, "--rows", "fp32", "w4a4_distilled_in_domain")
    (row,) = first["table"]
    assert (row["scheme"], row["role"], row["perplexity_ratio"], row["memory_ratio"]) == ("fp32", "full", 1.0, 1.0)
    assert row["kl_heldout_nats"] == pytest.approx(0, abs=1e-9)
    assert row["nll_gsm8k"] is None  # no public data
    layers, heads, channels, tokens = 2, 2, 16, 512
    assert row["kv_cache_bytes"] == 2 * layers * heads * channels * tokens * 4
    assert row["perplexity"] == pytest.approx(perplexity_by_hand(tmp_path / "cache"), rel=1e-5)
    assert row["latency_p50_ms"] > 0
    assert row["loop_rate"] is not None
    assert first["not_run"][0]["scheme"] == "w4a4_distilled_in_domain"
    assert "--data" in first["not_run"][0]["reason"]

    later = run(lowbit, monkeypatch, *common, "--minutes", "0", "--rows", "fp32", "w4a16_rtn")
    assert later["table"] == first["table"]
    assert later["not_run"][0]["scheme"] == "w4a16_rtn"
    assert "--minutes" in later["not_run"][0]["reason"]


def perplexity_by_hand(cache: Path) -> float:
    import torch
    from lowbit_texts import judging_text

    (folder,) = (cache / "model").iterdir()
    windows = judging_text(None, load_tokenizer(folder), SMALL["windows"], SMALL["window_tokens"])["windows"]
    model, words, nats = load_model(folder), len(load_tokenizer(folder)), []
    for window in windows:
        logits_TV = model(torch.tensor([window])).logits[0, :-1, :words]
        nats += (-logits_TV.log_softmax(-1).gather(-1, torch.tensor(window[1:])[:, None])[:, 0]).tolist()
    return math.exp(sum(nats) / len(nats))
