"""The harness refuses to time what is wrong, and what it prints can be read by a program."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from reflux.kernels import bench
from reflux.kernels.allocations import peak_bytes
from reflux.kernels.dual_scale_quant import bench as dual_scale_quant

CASE = bench.Case(name="8", inputs=(torch.arange(8.0),), bytes_moved=64)


def op(**providers: bench.Provider) -> SimpleNamespace:
    return SimpleNamespace(
        RTOL=1e-5, ATOL=0.0, cases=lambda device: [CASE], providers=lambda device: {"reference": doubled, **providers}
    )


def doubled(x: torch.Tensor) -> bench.Tensors:
    return (x * 2, torch.full_like(x, 2.0))


def test_a_wrong_value_or_gradient_is_not_timed():
    def wrong_value(x: torch.Tensor) -> bench.Tensors:
        return (x * 2.001, torch.full_like(x, 2.0))

    def wrong_gradient(x: torch.Tensor) -> bench.Tensors:
        return (x * 2, torch.full_like(x, torch.nan))

    for provider in (wrong_value, wrong_gradient):
        with pytest.raises(ValueError, match="kernel disagrees with the reference on 8, not timed"):
            bench.bench(op(kernel=provider), torch.device("cpu"), min_seconds=0.01)


def test_what_cannot_run_is_named_with_its_reason():
    result = bench.bench(op(other="it is not installed"), torch.device("cpu"), min_seconds=0.01)
    assert [row["provider"] for row in result["rows"]] == ["reference"]
    assert result["absent"] == {"other": "it is not installed"}


def test_the_peak_is_of_what_is_alive_together():
    given = torch.ones(1000)

    def run() -> torch.Tensor:
        doubled = given * 2
        kept = doubled + 1  # 4,000 bytes each
        del doubled
        kept.mul_(3)
        return given.view(10, 100) + kept.view(10, 100)

    assert peak_bytes(run, (given,), torch.device("cpu")) == 8000


def test_every_provider_and_case_has_a_row():
    result = bench.bench(op(kernel=lambda x: doubled(x)), torch.device("cpu"), min_seconds=0.01)
    assert [(row["case"], row["provider"]) for row in result["rows"]] == [("8", "reference"), ("8", "kernel")]
    for row in result["rows"]:
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["peak_mb"] == 64 / 1e6
        assert row["gb_per_s"] == pytest.approx(64 / row["ms_p50"] / 1e6)


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(dual_scale_quant, "SIZES", ((16, 63),))
    bench.main(["dual_scale_quant", "--device", "cpu", "--min-seconds", "0.01"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["op"] == "dual_scale_quant"
    assert [row["case"] for row in result["rows"]] == ["2 x 63 float32"]
