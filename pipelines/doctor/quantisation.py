"""Second look: does the forward round as its scheme says, from statistics that saw something?

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from reflux.components.algorithms.low_bit import LowBitLinear, full_precision_activations
from reflux.components.artifacts import Artifact
from reflux.components.bundles import policy_table
from reflux.pipelines.doctor.finding import Finding

ROPE_BITS = 8
"""Fewest that sine and cosine may have: at 4 perplexity rises (LOG.md)."""
ROPE_POSITIONS = 2048


def observers(profile: Artifact, sites: list[str], sequence_tokens: int) -> Finding:
    """Has each site seen values, at every position that training reaches? A watcher that stands still leaves none."""
    rows = profile.table("activations", ["site", "position_from", "tokens", "absmax"]).to_pylist()
    fix = "profile_kv on more and longer traces (profiled_traces, max_sequence_tokens)"
    alive = {row["site"] for row in rows if row["tokens"] and 0 < row["absmax"] < math.inf}
    if silent := [site for site in sites if site not in alive]:
        found = f"{len(silent)} of {len(sites)} sites have no statistics, the first is {silent[0]}"
        return Finding(check="observers", status="fail", found=found, fix=fix)
    seen = {row["position_from"] for row in rows if row["tokens"]}
    knots = policy_table.decode(profile.file("policy_table.bin")).knots
    begins = [0, *((a + b) // 2 + 1 for a, b in pairwise(knots))]
    if unseen := [begin for begin in begins if begin < sequence_tokens and begin not in seen]:
        found = (
            f"nothing was seen from position {unseen[0]} on, and distill's sequences have up to {sequence_tokens} "
            "tokens: scales there are copies"
        )
        return Finding(check="observers", status="warn", found=found, fix=fix)
    tokens = sum(row["tokens"] for row in rows if row["site"] == sites[0])
    return Finding(check="observers", status="ok", found=f"{len(sites)} sites have seen {tokens} tokens each")


@torch.no_grad()
def rounding(model: Any, token_ids: list[int]) -> Finding:
    """Does the low-bit model round, and in training mode as in evaluation?"""
    input_BT, position_BT = torch.tensor([token_ids]), torch.arange(len(token_ids))[None]

    def forward(training: bool) -> torch.Tensor:
        return model.train(training)(input_BT, position_ids=position_BT).logits

    trained, evaluated = forward(True), forward(False)
    with _unrounded(model):
        plain = forward(False)
    if torch.equal(evaluated, plain):
        found = "logits are those of the weights and activations before rounding: nothing is rounded"
        return Finding(check="rounding", status="fail", found=found, fix="distill.weight_bits, activation_bits")
    if not torch.equal(trained, evaluated):
        off = (
            "fake quantisation is off in training mode"
            if torch.equal(trained, plain)
            else "something hangs on the mode"
        )
        found = f"logits in training mode differ by {(trained - evaluated).abs().max():.2g} from evaluation: {off}"
        fix = "dropout in config.json, or code that asks module.training"
        return Finding(check="rounding", status="fail", found=found, fix=fix)
    found = f"rounding moves logits by up to {(evaluated - plain).abs().max():.2g}, in training as in evaluation"
    return Finding(check="rounding", status="ok", found=found)


@contextmanager
def _unrounded(model: Any) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    before = [layer.frozen_OI for layer in layers]
    try:
        for layer in layers:
            layer.frozen_OI = layer.latent().detach()
        with full_precision_activations(model):
            yield
    finally:
        for layer, frozen_OI in zip(layers, before, strict=True):
            layer.frozen_OI = frozen_OI


@torch.no_grad()
def rope(model: Any) -> Finding:
    """Are sine and cosine those of float32, or of at least ROPE_BITS?"""
    rotary = model.model.rotary_emb
    exact = type(rotary)(config=model.config)
    position_BT = torch.arange(min(ROPE_POSITIONS, model.config.max_position_embeddings))[None]
    x = torch.zeros(1, 1, 1)
    pairs = zip(rotary(x, position_BT), exact(x, position_BT), strict=True)
    error = max((used - right).abs().max().item() for used, right in pairs) / getattr(rotary, "attention_scaling", 1.0)
    if error < 1e-6:
        return Finding(check="rope", status="ok", found="sine and cosine are those of float32")
    bits = 1 + math.log2(1 + 0.5 / error)  # of a symmetric grid that is off by half a step
    found = f"sine and cosine are off by up to {error:.2g}, as those of {bits:.1f} bits are"
    if bits > ROPE_BITS - 0.1:
        return Finding(check="rope", status="ok", found=found)
    fix = f"at least {ROPE_BITS} bits: positions a few apart fall together"
    return Finding(check="rope", status="fail", found=found, fix=fix)
