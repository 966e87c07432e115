"""Bytes and bits of a KV cache and of an embedding against sums written out by hand: 2 layers, 2 KV heads of 16
channels.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.effective_bits import UNQUANTISED, cache_cost, costs_of_weights
from reflux.components.algorithms.kv_forms import KV_FORMS
from reflux.components.algorithms.low_bit import Scheme, apply_scheme
from reflux.components.evaluate.footprint import cache_bytes, deployed_bytes
from reflux.components.models import load_model

NUMBERS_OF_A_TOKEN = 2 * 2 * 2 * 16


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)


def test_a_cached_number_is_counted_with_its_share_of_scale_and_zero_point() -> None:
    assert cache_cost("full", 64) == UNQUANTISED
    assert cache_cost("int8", 64).total == 8 + 16 / 64
    assert cache_cost("int4", 16).total == 4 + 16 / 16
    key, value = 4 + (16 + 16) / 32, 4 + (16 + 16) / 16
    assert cache_cost("kivi4", 16).total == (key + value) / 2
    assert cache_cost("kivi2", 64).total == 2 + (16 + 16) / 32
    assert cache_cost("kivi4", 80).scale == (16 / 32 + 16 / 16) / 2  # 32 does not divide 80, 16 does


def test_bytes_are_those_of_every_cached_number(model: Any) -> None:
    assert cache_bytes(model, Scheme(), 100) == 100 * NUMBERS_OF_A_TOKEN * 4
    assert cache_bytes(model, Scheme(kv_cache="int8"), 100) == 100 * NUMBERS_OF_A_TOKEN * (8 + 1) / 8
    rounded, windowed = 64, 36  # the hundred and first token sees two groups rounded
    expected = NUMBERS_OF_A_TOKEN * (rounded * (2 + 1.5) + windowed * 32) / 8
    assert cache_bytes(model, Scheme(kv_cache="kivi2"), 100) == expected
    assert cache_bytes(model, Scheme(kv_cache="kivi2"), 63) == cache_bytes(model, Scheme(), 63)


def test_full_precision_is_the_type_that_the_model_has(tiny_model: Path) -> None:
    narrow = load_model(tiny_model).to(torch.bfloat16)
    assert cache_bytes(narrow, Scheme(), 10) == 10 * NUMBERS_OF_A_TOKEN * 2


def test_a_tied_embedding_of_8_bits_counts_once_and_one_of_its_own_twice(model: Any) -> None:
    words, channels = model.get_input_embeddings().weight.shape
    saved = words * channels * (32 - 8) / 8 - words * 16 / 8
    for rotation, ends in (("none", 1), ("hadamard", 2)):
        schemes = [Scheme(activation="plain", rotation=rotation, embedding_bits=bits) for bits in (16, 8)]
        students = [apply_scheme(copy.deepcopy(model), scheme) for scheme in schemes]
        full, narrow = (deployed_bytes(m, costs_of_weights(m, s), s) for m, s in zip(students, schemes, strict=True))
        assert full - narrow == ends * saved


def test_the_table_of_the_docs_is_this_count() -> None:
    text = (Path(__file__).parents[3] / "docs" / "low-bit.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    told = {row[0]: [float(cell or 0) for cell in row[1:]] for row in rows if row[0].startswith("cached,")}
    assert set(told) == {f"cached, {name}, heads of 64" for name in KV_FORMS}
    for name in KV_FORMS:
        counted = cache_cost(name, 64)
        shown = [counted.code, counted.flag, counted.scale, counted.zero_point, counted.total]
        assert told[f"cached, {name}, heads of 64"] == shown
