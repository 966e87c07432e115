"""The comparison of stored tokens on the tiny model, and the peer's form that it compares with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import traces
from parts.traces.fitted_logprobs import BUDGET, Fit, decoded, packed

VOCAB = 1000


def kept(tokens: int, k: int) -> np.ndarray:
    """[N, K] log-probabilities in falling order, as float32."""
    logits_NV = np.random.default_rng(0).normal(size=(tokens, VOCAB)) * 3
    logprobs_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    return -np.sort(-logprobs_NV, axis=-1)[:, :k].astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_the_curve_misses_is_half_a_step_of_its_residuals(bits: int) -> None:
    exact_NK, fit = kept(50, 32), Fit(exact_k=2, terms=(0, 1, "sqrt"), bits=bits)
    curve_NK = decoded(exact_NK, Fit(exact_k=2, terms=fit.terms, bits=0))
    step_N = np.abs(exact_NK - curve_NK)[:, 2:].max(-1) / (2 ** (bits - 1) - 1)
    error_NK = np.abs(decoded(exact_NK, fit) - exact_NK)
    assert (error_NK[:, :2] <= np.abs(exact_NK[:, :2]) * 2**-11).all()  # float16
    assert (error_NK[:, 2:].max(-1) <= 0.55 * step_N).all()  # the step itself is stored as a float16
    assert np.median(error_NK[:, 2:].max(-1) / step_N) > 0.3


@pytest.mark.parametrize("fit", [BUDGET, Fit(exact_k=4, terms=(0, 1, 2, "sqrt"), bits=7)])
def test_bytes_are_those_of_the_form(fit: Fit) -> None:
    logprobs_NK = kept(5, 50)
    ids_NK = np.argsort(np.random.default_rng(1).random((5, VOCAB)))[:, :50]
    data = packed(logprobs_NK, ids_NK, fit, VOCAB)
    assert data.shape == (5, fit.bytes_per_token(50, VOCAB))
    ids = np.unpackbits(data, axis=1)[:, -8 * (-(-50 * 10 // 8)) :][:, : 50 * 10].reshape(5, 50, 10)
    assert (ids @ (1 << np.arange(9, -1, -1)) == ids_NK).all()  # 10 bits name 1,000 words


@pytest.mark.slow
def test_one_command_compares_size_error_and_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    small = {"--model": tiny_model, "--prompts": 8, "--tokens": 12, "--shards": 2, "--rounds": 1}
    monkeypatch.setattr(sys, "argv", ["traces.py", *(str(text) for option in small.items() for text in option)])
    traces.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    ours, raw = (line.split("|") for line in lines if "reflux topk" in line or "raw:" in line)
    assert float(ours[2]) == pytest.approx(result["bytes_per_token"], abs=0.1)
    assert float(raw[2]) == 132.0
    assert 0 < float(ours[3]) < 0.02
    assert min(result["ratio_write"], result["ratio_read"]) > 0
