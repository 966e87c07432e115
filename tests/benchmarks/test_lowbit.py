"""The table of low-bit students on the tiny model: one row from nothing, then what a later call finds kept."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import lowbit
import pytest
import torch
from parts.lowbit.rows import ORDER, RECIPE, ROWS, Rounded, Trained
from parts.lowbit.texts import judging_text
from parts.lowbit.workshop import laid_over

from reflux.components.algorithms.low_bit import Scheme
from reflux.components.models import load_model, load_tokenizer
from reflux.pipelines import recipes

SMALL = {"windows": 2, "window_tokens": 24, "answers": 3, "latency_tokens": 4}


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setenv("REFLUX_DATA", "")
    out = Path(options[options.index("--out") + 1])
    monkeypatch.setattr(sys, "argv", ["lowbit.py", "--sizes", json.dumps(SMALL), "--threads", "1", *options])
    lowbit.main()
    return json.loads(out.read_text())


def test_every_row_is_a_scheme_or_a_recipe() -> None:
    """So that no row is refused after an hour."""
    assert sorted(ORDER) == sorted(ROWS)
    schemes = [Scheme(**row.scheme) for row in ROWS.values() if isinstance(row, Rounded)]
    made = [
        recipes.overridden(recipes.demo(), laid_over(RECIPE, row.changes)).distill
        for row in ROWS.values()
        if isinstance(row, Trained)
    ]
    assert len(schemes) >= 6
    assert all(config.ema_decay == RECIPE["distill"]["ema_decay"] for config in made)
    assert {config.on_policy_fraction for config in made} == {0.0, 0.75, 1.0}


@pytest.mark.slow
def test_rows_are_kept_and_what_cannot_be_made_says_why(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    common = ("--model", str(tiny_model), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out.json"),
              "--venv", str(tmp_path / "venv"))  # fmt: skip
    first = run(monkeypatch, *common, "--rows", "fp32", "w4a4_distilled_in_domain")
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

    later = run(monkeypatch, *common, "--minutes", "0", "--rows", "fp32", "w4a16_rtn")
    assert later["table"] == first["table"]
    assert later["not_run"][0]["scheme"] == "w4a16_rtn"
    assert "--minutes" in later["not_run"][0]["reason"]


def perplexity_by_hand(cache: Path) -> float:
    (folder,) = (cache / "model").iterdir()
    windows = judging_text(None, load_tokenizer(folder), SMALL["windows"], SMALL["window_tokens"])["windows"]
    model, words, nats = load_model(folder), len(load_tokenizer(folder)), []
    for window in windows:
        logits_TV = model(torch.tensor([window])).logits[0, :-1, :words]
        nats += (-logits_TV.log_softmax(-1).gather(-1, torch.tensor(window[1:])[:, None])[:, 0]).tolist()
    return math.exp(sum(nats) / len(nats))
