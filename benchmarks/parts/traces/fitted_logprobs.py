"""How DistillKit stores k log-probabilities, after its README ("Logit Compression"), to compare with on our traces.

Sorted log-probabilities: the first few as floats, a curve through the rest fitted by least squares over powers and the
root of the rank, what the curve misses as whole numbers of a few bits with one scale, everything packed to bits; token
ids with ceil(log2 V) bits. Written from the description alone.

Shapes: N tokens, K kept tokens, R fitted ones, E terms of the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One configuration: `exact_k` floats of 2 bytes, terms of 4 bytes, residuals of `bits` with a scale of 2 bytes."""

    exact_k: int
    terms: tuple[int | str, ...]
    bits: int
    """0: the curve alone."""

    def bytes_per_token(self, k: int, vocab_size: int) -> int:
        fitted = k - self.exact_k
        residuals = 2 + math.ceil(self.bits * fitted / 8) if self.bits else 0
        ids = math.ceil(k * math.ceil(math.log2(vocab_size)) / 8)
        return 2 * self.exact_k + 4 * len(self.terms) + residuals + ids


BUDGET = Fit(exact_k=1, terms=(0, 1, "sqrt"), bits=0)
"""The README's "budget pick", which it pairs with k = 50."""


def decoded(logprobs_NK: np.ndarray, fit: Fit) -> np.ndarray:
    """[N, K] what comes back, float32."""
    exact, rest_NR = logprobs_NK[:, : fit.exact_k].astype(np.float16), logprobs_NK[:, fit.exact_k :]
    design_RE = _design(rest_NR.shape[1], fit.terms)
    terms_EN = np.linalg.lstsq(design_RE, rest_NR.T.astype(np.float64), rcond=None)[0].astype(np.float32)
    curve_NR = (design_RE.astype(np.float32) @ terms_EN).T
    if fit.bits:
        codes_NR, scale_N1 = _codes(rest_NR - curve_NR, fit.bits)
        curve_NR = curve_NR + codes_NR * scale_N1
    return np.concatenate([exact.astype(np.float32), curve_NR], axis=1)


def packed(logprobs_NK: np.ndarray, token_ids_NK: np.ndarray, fit: Fit, vocab_size: int) -> np.ndarray:
    """[N, bytes_per_token] uint8 as they would be stored."""
    tokens = len(logprobs_NK)
    rest_NR = logprobs_NK[:, fit.exact_k :]
    design_RE = _design(rest_NR.shape[1], fit.terms)
    terms_NE = np.linalg.lstsq(design_RE, rest_NR.T.astype(np.float64), rcond=None)[0].T.astype(np.float32)
    parts = [
        logprobs_NK[:, : fit.exact_k].astype(np.float16).view(np.uint8).reshape(tokens, -1),
        np.ascontiguousarray(terms_NE).view(np.uint8).reshape(tokens, -1),
    ]
    if fit.bits:
        codes_NR, scale_N1 = _codes(rest_NR - terms_NE @ design_RE.T.astype(np.float32), fit.bits)
        parts += [scale_N1.astype(np.float16).view(np.uint8), _bits(codes_NR + 2 ** (fit.bits - 1), fit.bits)]
    parts.append(_bits(token_ids_NK, math.ceil(math.log2(vocab_size))))
    return np.concatenate(parts, axis=1)


def _design(fitted: int, terms: tuple[int | str, ...]) -> np.ndarray:
    rank_R = np.arange(fitted, dtype=np.float64)
    return np.stack([np.sqrt(rank_R) if term == "sqrt" else rank_R ** int(term) for term in terms], axis=1)


def _codes(residual_NR: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, R] whole numbers in ±(2^(bits-1) - 1), at least ±1, and [N, 1] scale."""
    largest = max(2 ** (bits - 1) - 1, 1)
    scale_N1 = (np.abs(residual_NR).max(1, keepdims=True) / largest).astype(np.float16).astype(np.float32)
    codes = np.rint(residual_NR / np.where(scale_N1 > 0, scale_N1, 1))
    return np.clip(codes, -largest, largest), scale_N1


def _bits(values_NM: np.ndarray, width: int) -> np.ndarray:
    places = np.arange(width - 1, -1, -1)
    bits_NMW = (values_NM.astype(np.int64)[..., None] >> places) & 1
    return np.packbits(bits_NMW.reshape(len(values_NM), -1).astype(np.uint8), axis=1)
