"""What is measured on a model, against literal loops; and that no number depends on padding or on neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.effective_bits import costs_of_weights
from reflux.components.algorithms.low_bit import (
    SITES,
    Scheme,
    apply_scheme,
    bits_of_sites,
    frozen_weights,
    site_modules,
    watching_sites,
)
from reflux.components.algorithms.outlier_capture import captured
from reflux.components.algorithms.output_head import output_head
from reflux.components.algorithms.policies import KNOTS, PositionTable
from reflux.components.evaluate.footprint import deployed_bytes
from reflux.components.evaluate.heldout import Trace, batches
from reflux.components.evaluate.measure import (
    decisions,
    decode_times_ms,
    generate,
    layer_errors,
    text_nats,
    trace_scores,
)
from reflux.components.evaluate.text import evaluation_text
from reflux.components.models import chat_token_ids, load_model, load_tokenizer

DUAL = Scheme(group_size=16)


def low_bit(folder: Path, scheme: Scheme = DUAL) -> Any:
    model = load_model(folder)
    sites = list(site_modules(model))
    return apply_scheme(model, scheme, PositionTable(sites, torch.full((len(sites), len(KNOTS), 2), 0.2)))


@pytest.fixture(scope="module")
def traces(tiny_model: Path) -> list[Trace]:
    tokenizer = load_tokenizer(tiny_model)
    generator = torch.Generator().manual_seed(0)
    return [
        Trace(
            trace_id=f"trace-{index}",
            prompt_id=f"prompt-{index}",
            prompt="x" * prompt,
            prompt_token_ids=chat_token_ids(tokenizer, "x" * prompt),
            response_token_ids=torch.randint(3, 259, (answer,), generator=generator).tolist(),
        )
        for index, (prompt, answer) in enumerate([(3, 40), (60, 1), (20, 17), (1, 5), (35, 30)])
    ]


def loop_nats(model: Any, tokens: list[int], first: int, vocab_size: int) -> float:
    """-log p of every token from `first` on, one prefix at a time."""
    nats = 0.0
    for end in range(first, len(tokens)):
        prefix = torch.tensor([tokens[:end]])
        logits = model(input_ids=prefix, position_ids=torch.arange(end)[None]).logits[0, -1, :vocab_size]
        nats -= logits.double().log_softmax(-1)[tokens[end]].item()
    return nats


def test_perplexity_is_that_of_a_literal_loop(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    text = evaluation_text(None, tokenizer, windows=2, window_tokens=24)
    model = load_model(tiny_model)
    nats = text_nats(model, output_head(model), text.window_WT, len(tokenizer))
    expected = [loop_nats(model, window.tolist(), 1, len(tokenizer)) for window in text.window_WT]
    assert nats == pytest.approx(expected, rel=1e-5)
    assert text.scored_tokens == 2 * 23


@pytest.mark.parametrize("quantised", [False, True])
def test_answers_score_as_in_a_literal_loop_whatever_they_are_batched_with(
    tiny_model: Path, traces: list[Trace], quantised: bool
):
    model = low_bit(tiny_model) if quantised else load_model(tiny_model)
    expected = {
        trace.trace_id: loop_nats(
            model, trace.prompt_token_ids + trace.response_token_ids, len(trace.prompt_token_ids), 259
        )
        for trace in traces
    }
    for size in (1, 2, 5):
        held = batches(traces, size, pad_token_id=0)
        own = decisions(model, output_head(model), held)
        scores = trace_scores(held, own, own, 259)
        assert [score.trace_id for score in scores] == sorted(expected)
        assert [score.tokens for score in scores] == [len(trace.response_token_ids) for trace in traces]
        # a value on a rounding border may fall to the other side in another batch
        tolerance = 1e-4 if quantised else 1e-5
        assert {s.trace_id: s.nll_nats for s in scores} == pytest.approx(expected, rel=tolerance)


def test_an_identical_model_matches_its_teacher_and_has_no_layer_error(tiny_model: Path, traces: list[Trace]):
    held = batches(traces, 3, pad_token_id=0)
    model, teacher = load_model(tiny_model), load_model(tiny_model)
    own, reference = (decisions(m, output_head(m), held) for m in (model, teacher))
    assert sum(score.jsd_bits for score in trace_scores(held, own, reference, 259)) == pytest.approx(0, abs=1e-4)
    assert layer_errors(own, reference) == [0.0, 0.0]


def test_quantisation_shows_in_divergence_and_grows_from_layer_to_layer(tiny_model: Path, traces: list[Trace]):
    held = batches(traces, 3, pad_token_id=0)
    teacher = load_model(tiny_model)
    reference = decisions(teacher, output_head(teacher), held)
    model = low_bit(tiny_model)
    with frozen_weights(model):
        own = decisions(model, output_head(model), held)
    first, second = layer_errors(own, reference)
    assert 0 < first < second
    assert all(0 < score.jsd_bits < score.tokens for score in trace_scores(held, own, reference, 259))


def test_caught_outliers_are_those_of_the_decisions_of_the_first_batch(tiny_model: Path, traces: list[Trace]):
    held, model = batches(traces, 3, pad_token_id=0), low_bit(tiny_model)
    head, bits = output_head(model), bits_of_sites(model, DUAL)
    entered: list[torch.Tensor] = []
    with watching_sites(model, lambda site, x_BTD: entered.append(x_BTD[held[0].decision_BT])):
        own = decisions(model, head, held[:1], site_bits=bits)
    main_N1 = torch.full((len(entered[0]), 1), 0.2)
    expected = torch.stack([captured(x_ND, main_N1, 4) for x_ND in entered])
    assert len(entered) == 8
    assert own.outlier_capture == pytest.approx(expected.mean().item())
    assert 0.01 < expected.mean() < 1
    whole = decisions(model, head, held, site_bits=bits)
    assert whole.outlier_capture == pytest.approx(own.outlier_capture)
    assert decisions(model, head, held).outlier_capture is None


def test_latency_times_the_tokens_asked_for_and_goes_on_past_eos(tiny_model: Path):
    tokenizer = load_tokenizer(tiny_model)
    times = decode_times_ms(load_model(tiny_model), tokenizer, chat_token_ids(tokenizer, "hello"), 25)
    assert len(times) == 25
    assert all(0 < ms < 1000 for ms in times)


def test_generations_are_text_of_each_prompt(tiny_model: Path, traces: list[Trace]):
    tokenizer, model = load_tokenizer(tiny_model), load_model(tiny_model)
    answers = generate(model, tokenizer, traces[:3], 6)
    assert [answers[0]] == generate(model, tokenizer, traces[:1], 6)
    assert generate(model, tokenizer, [], 6) == []
    assert all("<|end|>" not in answer for answer in answers)


def test_memory_counts_codes_scales_table_and_a_tied_embedding_once(tiny_model: Path):
    plain = load_model(tiny_model)
    linear = sum(p.numel() for name, p in plain.named_parameters() if "proj" in name)
    other = sum(p.numel() for name, p in plain.named_parameters() if "proj" not in name)
    unquantised = Scheme(weight_bits=16, activation_bits=16)
    assert deployed_bytes(plain, costs_of_weights(plain, unquantised), unquantised) == 4 * (linear + other)
    table = 2 * len(SITES) * len(KNOTS) * 2 * 4
    codes_and_scales = linear * 4 // 8 + linear // 16 * 2
    model = low_bit(tiny_model)
    assert deployed_bytes(model, costs_of_weights(model, DUAL), DUAL) == codes_and_scales + other * 4 + table
    asymmetric = replace(DUAL, zero_points=True)
    with_zero_points = deployed_bytes(model, costs_of_weights(model, asymmetric), asymmetric)
    assert with_zero_points == codes_and_scales + linear // 16 * 4 // 8 + other * 4 + table


def test_text_windows_cover_the_text_evenly_without_overlap(tiny_model: Path, tmp_path: Path):
    tokenizer = load_tokenizer(tiny_model)
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(1000)), encoding="utf-8")
    text = evaluation_text(path, tokenizer, windows=4, window_tokens=100)
    starts = [tokenizer.decode(window[:3]) for window in text.window_WT]
    whole = path.read_text(encoding="utf-8")
    assert [whole[start : start + 3] for start in (0, 200, 500, 700)] == starts
    assert text.name == "text.txt"


def test_a_short_or_unreadable_text_is_refused(tiny_model: Path, tmp_path: Path):
    tokenizer = load_tokenizer(tiny_model)
    path = tmp_path / "text.txt"
    path.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.txt: 9 tokens are too few for evaluate.windows 2"):
        evaluation_text(path, tokenizer, windows=2, window_tokens=8)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a readable UTF-8 text"):
        evaluation_text(path, tokenizer, windows=2, window_tokens=8)


@pytest.mark.parametrize("scheme", [None, Scheme(group_size=16, activation="plain")])
def test_numbers_that_are_not_finite_are_traced_to_their_module(
    tiny_model: Path, traces: list[Trace], scheme: Scheme | None
):
    model = load_model(tiny_model)
    held = batches(traces, 3, 0)
    head = output_head(model)
    if scheme is not None:
        apply_scheme(model, scheme)
    model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.inf
    module, trace = r"model\.layers\.1\.mlp\.down_proj", held[0].traces[0].trace_id
    with pytest.raises(ValueError, match=rf"evaluate: row: the output of {module} is .* position 0 of trace {trace}"):
        decisions(model, head, held, who="evaluate: row")
    window_WT = torch.arange(3, 43).reshape(2, 20)
    with pytest.raises(ValueError, match=rf"evaluate: the output of {module} is .* position 0 of window 0 of the text"):
        text_nats(model, head, window_WT, 260)
