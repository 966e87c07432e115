"""The one command that measures a bundle on low-bit kernels, on the tiny model: two of its forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deployed
import pytest
from tiny_bundle import write_tiny_bundle


@pytest.mark.slow
def test_one_command_compares_forms_with_full_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", tiny_model, group_size=32)
    options = ["--base", str(tiny_model), "--tokens", "4", "--window-tokens", "80"]
    monkeypatch.setattr(sys, "argv", ["deployed.py", str(bundle), *options, "--forms", "weights_only_bfloat16"])
    deployed.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    full, low_bit = result["forms"]["fp32"], result["forms"]["weights_only_bfloat16"]
    layers, heads, channels, tokens = 2, 2, 16, 512
    assert full["kv_bytes"] == 2 * layers * heads * channels * tokens * 4 == 2 * low_bit["kv_bytes"]
    assert low_bit["held_bytes"] < full["held_bytes"] / 2
    assert result["to_fp32"]["fp32"] == {"memory": 1.0, "decode": 1.0}
    assert 0.5 * full["perplexity"] < low_bit["perplexity"] < 2 * full["perplexity"]
    assert min(full["decode_ms_p50"], low_bit["resident_bytes"] / 1e6) > 0
