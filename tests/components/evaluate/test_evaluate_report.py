"""Gates, metrics.json and the page: verdicts from known rows, and nothing of a prompt that a browser could run."""

from __future__ import annotations

import html.parser
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from reflux.components.evaluate import report
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.evaluate.gate import gaps_closed, gates, verdict
from reflux.components.evaluate.heldout import Trace
from reflux.components.evaluate.measure import TraceScore
from reflux.components.evaluate.row import Row
from reflux.components.evaluate.summary import summarize, tracked_metrics
from reflux.components.evaluate.text import EvaluationText

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> & "quoted" \u202e {{ 7 * 7 }}'
CONFIG = EvaluateConfig()
TEXT = EvaluationText(name=HOSTILE, sha256="0" * 64, window_WT=torch.zeros(4, 11, dtype=torch.long))


def row(scheme: str, role: str, nats_text: float, nats_heldout: float, jsd_bits: float = 0.1) -> Row:
    """A scheme with the same nats per token on every window and trace."""
    return Row(
        scheme=scheme,
        role=role,
        text_nats=[10 * nats_text] * 4,
        text_tokens=40,
        traces=[
            TraceScore(trace_id=f"t{i}", tokens=5, nll_nats=5 * nats_heldout, jsd_bits=5 * jsd_bits) for i in range(6)
        ],
        layer_errors=[0.1, 0.2],
        generations=[HOSTILE, "fine"],
        decode_ms=[1.0, 2.0, 3.0, 4.0],
        latency_of="simulated",
        memory_bytes=123_456_789,
        kv_cache_bytes=23_592_960,
        effective_bits=4.25,
        effective_bits_activation=5.0,
        quantizer_digest="d" * 64,
        outlier_capture=0.75,
    )


ROWS = [
    replace(row("fp32", "full", 3.0, 1.0, 0.0), effective_bits=32.0, effective_bits_activation=32.0),
    row("w4a16_rtn", "weights_only", 3.2, 1.1),
    row("w4a4_plain", "plain", 9.0, 7.0, 0.9),
    row("w4a4_dual", "undistilled", 4.0, 2.0, 0.3),
    row("w4a4_distilled", "distilled", 3.5, 1.25, 0.15),
]
PROMPTS = [
    Trace(trace_id=f"t{i}", prompt_id=f"p{i}", prompt=HOSTILE, prompt_token_ids=[1], response_token_ids=[2])
    for i in range(2)
]
TRAINING = [
    {"step": step, "phase": "warmup" if step < 3 else "joint", "metric": metric, "value": 1 / step}
    for step in range(1, 7)
    for metric in ("loss_nats", "kl_forward_nats", "response_tokens")
]


def summary_of(rows: list[Row], config: EvaluateConfig = CONFIG) -> dict:
    gaps = gaps_closed(rows, config.seed)
    asked = [{"dimension": HOSTILE, "usable": 40, "asked": 20, "heldout": 4, "share": 1.0}]
    return summarize(config, rows, gaps, gates(config, rows, gaps), TEXT, {"bundle": "sha256:" + "b" * 64}, {}, asked)


def results(rows: list[Row], config: EvaluateConfig = CONFIG) -> dict[str, str]:
    return {gate.name: gate.result for gate in gates(config, rows, gaps_closed(rows, 0))}


def test_gap_closed_of_both_texts():
    gaps = gaps_closed(ROWS, 0)
    assert gaps["text"].value == pytest.approx(0.5)
    assert gaps["heldout"].value == pytest.approx(0.75)
    assert gaps["heldout"].low == pytest.approx(0.75)


def test_every_gate_passes_at_its_threshold_and_fails_beyond_it():
    at = {
        "min_gap_closed_heldout": 0.75,
        "min_gap_closed_text": 0.5,
        "max_perplexity_ratio": math.exp(0.5),
        "min_pmr": 0.85,
    }
    for name, threshold in at.items():
        closer, further = (threshold - 1e-9, threshold + 1e-6)
        passing, failing = (further, threshold - 1e-6) if name.startswith("max") else (closer, further)
        assert results(ROWS, replace(CONFIG, **{name: passing}))[name] == "pass"
        assert results(ROWS, replace(CONFIG, **{name: failing}))[name] == "fail"
        assert results(ROWS, replace(CONFIG, **{name: 0.0}))[name] == "off"


def test_one_failed_gate_fails_the_verdict_and_gates_that_are_off_do_not_count():
    assert summary_of(ROWS)["verdict"] == "pass"
    assert summary_of(ROWS, replace(CONFIG, min_pmr=0.9))["verdict"] == "fail"
    off = replace(CONFIG, min_gap_closed_heldout=0, min_gap_closed_text=0, max_perplexity_ratio=0, min_pmr=0)
    assert set(results(ROWS, off).values()) == {"off"}
    assert verdict(gates(off, ROWS, gaps_closed(ROWS, 0))) == "pass"


def test_without_a_gap_the_gate_fails_and_json_says_null():
    no_gap = [replace(r, text_nats=[30.0] * 4) if r.role == "undistilled" else r for r in ROWS]
    summary = summary_of(no_gap)
    assert summary["gap_closed"]["text"] == {"value": None, "low": None, "high": None}
    assert results(no_gap)["min_gap_closed_text"] == "fail"
    assert "gap_closed.text" not in tracked_metrics(summary)
    assert report.render(summary, no_gap, prompts=PROMPTS, training=TRAINING)


def test_metrics_json_holds_what_the_command_line_prints():
    summary = json.loads(json.dumps(summary_of(ROWS), allow_nan=False))
    assert [line["scheme"] for line in summary["table"]] == [r.scheme for r in ROWS]
    assert summary["table"][4] == {
        "scheme": "w4a4_distilled",
        "role": "distilled",
        "perplexity": pytest.approx(math.exp(3.5)),
        "nll_text": 3.5,
        "nll_heldout": 1.25,
        "pmr": pytest.approx(0.85),
        "effective_bits": 4.25,
        "effective_bits_activation": 5.0,
        "memory_bytes": 123_456_789,
        "kv_cache_bytes": 23_592_960,
        "quantizer_digest": "d" * 64,
        "outlier_capture": 0.75,
        "latency_p50_ms": 2.5,
        "latency_p95_ms": pytest.approx(3.85),
        "latency_of": "simulated",
    }
    for gate in summary["gates"]:
        assert set(gate) == {"name", "meaning", "value", "comparison", "threshold", "result"}
    assert summary["text"]["scored_tokens"] == 40
    assert summary["heldout"] == {"traces": 6, "tokens": 30}
    assert summary["config"]["windows"] == 8


def test_tracked_metrics_are_finite_numbers_under_plain_names():
    metrics = tracked_metrics(summary_of(ROWS))
    assert metrics["gap_closed.heldout"] == pytest.approx(0.75)
    assert metrics["verdict.pass"] == 1.0
    assert all(math.isfinite(value) and re.fullmatch(r"[\w.]+", name) for name, value in metrics.items())


class Page(html.parser.HTMLParser):
    """What a browser would see: elements, attributes that load or run something, ids, text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler {name}"
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def source() -> str:
    return report.render(summary_of(ROWS), ROWS, prompts=PROMPTS, training=TRAINING)


def test_prompts_and_answers_are_shown_and_cannot_run(source: str):
    page = Page(source)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count(HOSTILE) == 2 + len(PROMPTS) + len(ROWS)  # the text's name, a dimension, first answers
    assert "default-src 'none'" in source


def test_the_page_loads_nothing(source: str):
    assert "http://" not in source
    assert "https://" not in source
    assert "@import" not in source
    assert not {"link", "iframe", "object", "embed"} & Page(source).tags
    assert {link for link in Page(source).links if not link.startswith("#")} == {"profile.html"}  # lies beside it
    assert set(re.findall(r"url\((.)", source)) <= {"#"}


def test_ids_of_the_plots_do_not_clash_and_references_lead_somewhere(source: str):
    page = Page(source)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", source)) <= set(page.ids)


def test_the_page_has_every_section_and_is_the_same_each_time(source: str):
    for heading in (
        "Gates",
        "Schemes",
        "What the teacher was asked",
        "Training",
        "Error by layer",
        "Perplexity against bits",
        "Lineage",
    ):
        assert heading in source
    assert source.count("<svg") == 4
    assert source == report.render(summary_of(ROWS), ROWS, prompts=PROMPTS, training=TRAINING)


def test_without_training_curves_or_answers_the_page_says_so():
    bare = [replace(r, generations=[]) for r in ROWS]
    source = report.render(summary_of(bare), bare, prompts=[], training=[])
    assert "no training curves" in source
    assert "Answers side by side" not in source


@pytest.mark.parametrize(
    ("value", "text"), [(6643.8, "6,644"), (27.651, "27.7"), (0.5267, "0.527"), (0, "0"), (None, "\N{EN DASH}")]
)
def test_numbers_read_well(value: float | None, text: str):
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("windows", 0, "at least 1"),
        ("latency_tokens", 5, "at least 20"),
        ("min_pmr", 1.5, r"\[0, 1\]"),
        ("max_perplexity_ratio", 0.5, "at least 1, or 0 for off"),
    ],
)
def test_wrong_settings_are_refused_by_name(field: str, value: object, allowed: str):
    with pytest.raises(ValueError, match=rf"evaluate\.{field} .*{allowed}"):
        EvaluateConfig(**{field: value})
