"""Writes what it read, and publishes points with fixed times, as a checkpoint would hold them."""

from __future__ import annotations

import os
import signal
import time

from reflux.components import progress
from reflux.components.artifacts import Writer
from reflux.components.storage import StoreError
from toy_stages.brew.config import BrewConfig


def run(config: BrewConfig, *, tea: Writer) -> dict[str, float]:
    leaves = tea.source("leaves").read_text() if config.leaves else "no leaves"
    print(f"brewing {leaves.strip()}")
    for step in range(1, config.steps + 1):
        progress.report(step, config.steps, "minutes", note=config.note)
    values = {"warmth": 0.5, "loss_nats": float("nan")}
    progress.publish(
        [progress.MetricPoint(step=s, time_ms=1000 * s, values=values) for s in range(1, config.steps + 1)]
    )
    if config.fault == "value":
        raise ValueError("brew.leaves: too\nold, from 2 to 5 days are allowed")
    if config.fault == "crash":
        raise RuntimeError("the pot broke")
    if config.fault == "outage":
        raise StoreError("store s3://pantry: no answer")
    if config.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.fault == "memory":
        print(len(bytearray(2 << 30)))  # zeroed, so every page is really taken
    if config.fault == "sleep":
        print(f"sleeping as {os.getpid()}", flush=True)
        time.sleep(60)
    tea.write_file("tea.txt", f"{leaves}|{config.minutes}|{config.note}".encode())
    return {"warmth": 0.9, "cups": 2.0}
