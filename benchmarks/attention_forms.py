"""What it costs to round weights, activations, keys and values and rotary tables, as the model came, turned, or with
equalised channels: perplexity alone.

    .venv/bin/python benchmarks/attention_forms.py --data FOLDER

Nothing is trained. Windows of WikiText-2's test text from FOLDER, or of the language reference of CPython without one;
on other windows (the validation text, or the reference's windows between) the position table of dual scales is made and
channels are counted.
The last line is JSON: row -> perplexity and, where there is a cache, bytes of it for a window. A few minutes with the
real model.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from parts.demo import MODEL
from parts.lowbit.texts import TEST_TEXT, VALIDATION_TEXT

from reflux.components import models, sources
from reflux.components.algorithms.equalization import LEAST_NOISE, ChannelPower, equalize, equalizing_scales
from reflux.components.algorithms.low_bit import (
    Scheme,
    apply_scheme,
    frozen_weights,
    profiled_table,
    site_modules,
    watching_sites,
)
from reflux.components.algorithms.output_head import output_head
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.rope_tables import round_rope
from reflux.components.evaluate.footprint import cache_bytes
from reflux.components.evaluate.measure import text_nats
from reflux.components.evaluate.text import evaluation_text
from reflux.components.profile_kv.activations import ActivationWatch, position_table

WEIGHTS_16: dict[str, Any] = {"weight_bits": 16, "activation_bits": 16}
A4: dict[str, Any] = {"weight_bits": 16, "activation_bits": 4}
W4: dict[str, Any] = {"activation_bits": 16, "zero_points": True}
W4A4: dict[str, Any] = {"zero_points": True}
POWERS = (0.25, 0.4, 0.45, LEAST_NOISE, 0.55, 0.6, 0.75)
ROWS: dict[str, dict[str, Any]] = {
    "full": WEIGHTS_16,
    **{f"cache {name}": WEIGHTS_16 | {"kv_cache": name} for name in ("int8", "int4", "kivi4", "kivi2")},
    "rope 8": WEIGHTS_16 | {"rope_bits": 8},
    "rope 4": WEIGHTS_16,
    "turned": WEIGHTS_16 | {"rotation": "hadamard"},
    "a4 plain": A4 | {"activation": "plain"},
    "a4 dual": A4,
    "a4 hadamard": A4 | {"activation": "plain", "rotation": "hadamard"},
    "a4 dual, down_in 8": A4 | {"exceptions": ("down_in=8",)},
    "a4 hadamard, down_in 8": A4 | {"activation": "plain", "rotation": "hadamard", "exceptions": ("down_in=8",)},
    "w4": {"activation_bits": 16},
    "w4 hadamard": {"activation_bits": 16, "rotation": "hadamard"},
    "w4a4 plain": {"activation": "plain"},
    "w4a4 dual": {},
    "w4a4 hadamard": {"activation": "plain", "rotation": "hadamard"},
    "w4a4 dual, cache kivi4, rope 8": {"kv_cache": "kivi4", "rope_bits": 8},
    "w4 zero points": W4,
    "w4a4 dual, zero points": W4A4,
    "a4 dual, equalised": A4,
    "a4 plain, equalised": A4 | {"activation": "plain"},
    "w4 zero points, equalised": W4,
    **{f"w4a4 dual, zero points, equalised {power}": W4A4 for power in POWERS},
    "w4a4 plain, zero points, equalised": W4A4 | {"activation": "plain"},
    "w4a3 dual, zero points, equalised": W4A4 | {"activation_bits": 3},
    "w4a3 dual, down_in 4, zero points, equalised": W4A4 | {"activation_bits": 3, "exceptions": ("down_in=4",)},
}
"""Row -> fields of its scheme. No scheme has tables of 4 bits: that row's are rounded by hand."""
SAMPLED_TOKENS, BITS = 64, 4
"""Of a position table: tokens of each window on which scales are tried, and bits that they are chosen for."""


def power_of(name: str) -> float:
    """By which the row's channels are equalised; where it names none, by that of least noise."""
    _, equalised, power = name.partition("equalised")
    return float(power or LEAST_NOISE) if equalised else 0.0


def read(model: Any, window_WT: torch.Tensor, watch: Any) -> None:
    """Show the watch what passes while the model reads the windows."""
    with torch.no_grad(), watching_sites(model, watch.see):
        for window_T in window_WT:
            watch.begin(torch.ones(1, len(window_T)))
            model.model(window_T[None], position_ids=torch.arange(len(window_T))[None])


def profiled(path: Path, window_WT: torch.Tensor, power: float) -> tuple[dict[str, torch.Tensor], PositionTable]:
    """What the channels are divided by, nothing at a power of 0, and the position table of the model after it."""
    model, scales = models.load_model(path), {}
    if power:
        channels = ChannelPower()
        read(model, window_WT, channels)
        scales = equalizing_scales(model, channels.rms(), power)
        equalize(model, scales)
    watch = ActivationWatch(SAMPLED_TOKENS, len(window_WT), seed=0)
    read(model, window_WT, watch)
    return scales, position_table(watch, list(site_modules(model)), bits=BITS)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=MODEL)
    options.add_argument("--data", default=os.environ.get("REFLUX_DATA", ""), help="folder of public data; or none")
    options.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    options.add_argument("--windows", type=int, default=4)
    options.add_argument("--window-tokens", type=int, default=512)
    given = options.parse_args()
    path = sources.fetch(given.model)
    tokenizer, size = models.load_tokenizer(path), {"window_tokens": given.window_tokens}
    if given.data:
        judging = evaluation_text(Path(given.data) / TEST_TEXT, tokenizer, windows=given.windows, **size)
        seen = evaluation_text(Path(given.data) / VALIDATION_TEXT, tokenizer, windows=given.windows, **size).window_WT
    else:
        both = evaluation_text(None, tokenizer, windows=2 * given.windows, **size).window_WT
        judging = evaluation_text(None, tokenizer, windows=given.windows, **size)
        seen = both[1::2]
    profiles = {power: profiled(path, seen, power) for power in {power_of(name) for name in given.rows}}
    found: dict[str, dict[str, float]] = {}
    for name in given.rows:
        scheme, model = Scheme(**ROWS[name]), models.load_model(path)
        scales, table = profiles[power_of(name)]
        if scales:
            equalize(model, scales)
        apply_scheme(model, scheme, profiled_table(table, scheme, chosen_for=BITS) if scheme.needs_policy else None)
        if name == "rope 4":
            round_rope(model, 4)
        with frozen_weights(model):
            nats = sum(text_nats(model, output_head(model), judging.window_WT, len(tokenizer)))
        found[name] = {
            "perplexity": math.exp(nats / judging.scored_tokens),
            "kv_cache_bytes": cache_bytes(model, scheme, given.window_tokens),
        }
        print(f"{name:46} {found[name]['perplexity']:12.2f}", flush=True)
        del model
        gc.collect()  # hooks and modules refer to each other
    print(json.dumps({"text": judging.name, "windows": given.windows, **size, "rows": found}))


if __name__ == "__main__":
    main()
