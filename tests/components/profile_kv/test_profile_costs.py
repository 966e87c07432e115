"""What a decoded token costs: a clock that only counts, tables against numpy, and a model that is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from reflux.components import models
from reflux.components.algorithms.slot_cache import cache_argument
from reflux.components.profile_kv.clocks import CudaClock, HostClock
from reflux.components.profile_kv.cost_tables import (
    bucket_rows,
    cost_metrics,
    cost_rows,
    expected_cost_us,
    overhead_rows,
)
from reflux.components.profile_kv.decode_cost import AccessTimer, DecodeCost, decode_cost

LAYERS = 2
PROMPT, ANSWER = [1, 50, 60, 70, 80], [90, 91, 92, 93]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return models.load_model(tiny_model)


def synthetic(trace_id: str, first: int, tokens: int, rounds: int = 3, seed: int = 0) -> DecodeCost:
    times = torch.rand(5, rounds, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100
    return DecodeCost(
        trace_id=trace_id,
        first_position=first,
        kv_bytes=[64 * (first + offset + 1) for offset in range(tokens)],
        bare_us_RT=1000 + times[0],
        profiled_us_RT=1020 + times[1],
        update_us_RT=times[2],
        read_us_RT=2 * times[3],
    )


COSTS = [synthetic("a", 95, 10, seed=1), synthetic("b", 97, 6, seed=2), synthetic("b2", 430, 3, seed=3)]


def test_the_parts_of_a_token_are_within_the_token(model: Any) -> None:
    cost = decode_cost(model, "a", PROMPT, ANSWER, rounds=3, warm_up=True)
    for us_RT in (cost.bare_us_RT, cost.profiled_us_RT, cost.update_us_RT, cost.read_us_RT):
        assert us_RT.shape == (3, len(ANSWER))
        assert (us_RT > 0).all()
    assert (cost.access_us() < cost.profiled_us_RT).all()
    assert cost.first_position == len(PROMPT)
    assert cost.kv_bytes == [LAYERS * 2 * 2 * 16 * 4 * (len(PROMPT) + 1 + t) for t in range(len(ANSWER))]


def test_every_update_and_read_is_marked_once_and_nothing_else(model: Any) -> None:
    """A clock that counts its readings: an access spans one tick, so a token's costs are its layers."""

    class Ticks:
        def __init__(self) -> None:
            self.now = 0

        def mark(self) -> int:
            self.now += 1
            return self.now

    clock, cache = Ticks(), DynamicCache(config=model.config)
    timer = AccessTimer(clock)
    with torch.no_grad(), timer.timing(model, cache):
        for position, token in enumerate(ANSWER):
            inputs = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[position]])}
            model(**inputs, **{cache_argument(model): cache}, use_cache=True)
    assert clock.now == len(ANSWER) * LAYERS * 4
    for marks in (timer.updates, timer.reads):
        assert len(marks) == len(ANSWER) * LAYERS
        assert {end - begin for begin, end in marks} == {1}
    assert all(update[1] < read[0] for update, read in zip(timer.updates, timer.reads, strict=True))


def test_timing_leaves_model_and_cache_as_they_were(model: Any) -> None:
    def answered() -> torch.Tensor:
        return model(torch.tensor([PROMPT])).logits

    before = answered()
    cache = DynamicCache(config=model.config)
    with pytest.raises(RuntimeError, match="on purpose"), AccessTimer(HostClock()).timing(model, cache):
        raise RuntimeError("on purpose")
    assert "update" not in vars(cache)
    decode_cost(model, "a", PROMPT, ANSWER, rounds=1, warm_up=False)
    assert torch.equal(answered(), before)


def test_rows_are_medians_over_rounds() -> None:
    rows = cost_rows(COSTS)
    assert [(row["trace_id"], row["position"]) for row in rows[8:12]] == [("a", 103), ("a", 104), ("b", 97), ("b", 98)]
    for row, token in zip(rows[:10], range(10), strict=True):
        assert row["update_us"] == pytest.approx(np.median(COSTS[0].update_us_RT[:, token]))
        assert row["read_us"] == pytest.approx(np.median(COSTS[0].read_us_RT[:, token]))
        assert row["token_us"] == pytest.approx(np.median(COSTS[0].bare_us_RT[:, token]))
        assert row["kv_bytes"] == 64 * (95 + token + 1)


def test_buckets_hold_every_timing_once() -> None:
    rows = bucket_rows(COSTS)
    assert [(row["position_from"], row["position_to"]) for row in rows] == [(0, 100), (100, 200), (400, 500)]
    assert [row["tokens"] for row in rows] == [5 + 3, 5 + 3, 3]
    assert [row["timings"] for row in rows] == [24, 24, 9]
    first = np.concatenate([COSTS[0].access_us()[:, :5].flatten(), COSTS[1].access_us()[:, :3].flatten()])
    assert rows[0]["access_us_mean"] == pytest.approx(first.mean())
    assert rows[0]["access_us_variance"] == pytest.approx(first.var())
    for row in rows:
        assert row["access_us_mean"] == pytest.approx(row["update_us_mean"] + row["read_us_mean"])
    assert rows[2]["token_us_mean"] == pytest.approx(np.mean(COSTS[2].bare_us_RT.numpy()))
    assert rows[2]["token_us_variance"] == pytest.approx(np.var(COSTS[2].bare_us_RT.numpy()))
    assert bucket_rows([]) == []


def test_a_position_without_timings_takes_the_nearest_bucket() -> None:
    rows = bucket_rows(COSTS)
    means = [row["access_us_mean"] for row in rows]
    expected = expected_cost_us(torch.tensor([0, 99, 100, 299, 301, 470, 9000]), rows).tolist()
    assert expected == pytest.approx([means[0], means[0], means[1], means[1], means[2], means[2], means[2]])


def test_the_profilers_own_cost_is_told_beside_the_noise() -> None:
    rows, metrics = overhead_rows(COSTS), cost_metrics(COSTS)
    bare, profiled = (
        np.concatenate([getattr(cost, f"{how}_us_RT") for cost in COSTS], 1) for how in ("bare", "profiled")
    )
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert [row["tokens"] for row in rows] == [19] * 3
    assert [row["bare_us_p50"] for row in rows] == pytest.approx(np.median(bare, 1).tolist())
    assert [row["profiled_us_p50"] for row in rows] == pytest.approx(np.median(profiled, 1).tolist())
    added = np.median(np.median(profiled, 0) - np.median(bare, 0))
    assert metrics["profiler_overhead_us"] == pytest.approx(added)
    assert metrics["profiler_overhead_share"] == pytest.approx(added / np.median(bare))
    assert metrics["profiler_noise_us"] == pytest.approx(np.median(np.abs(np.diff(bare, axis=0))))
    assert "profiler_noise_us" not in cost_metrics([synthetic("a", 0, 3, rounds=1)])
    assert cost_metrics([]) == {}
    assert overhead_rows([]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_events_time_the_device(tiny_model: Path) -> None:
    cost = decode_cost(models.load_model(tiny_model).to("cuda"), "a", PROMPT, ANSWER, rounds=2, warm_up=True)
    assert (cost.update_us_RT > 0).all()
    assert (cost.read_us_RT > 0).all()
    assert (cost.access_us() < cost.profiled_us_RT).all()
    clock = CudaClock()
    for _ in range(2):  # events are used again
        (spent_us,) = clock.durations_us([(clock.mark(), clock.mark())])
        assert 0 <= spent_us < 1e6
    assert len(clock.events) == 2
