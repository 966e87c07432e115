"""Low-bit students beside each other and beside other libraries' methods: make bench-lowbit.

    .venv/bin/python benchmarks/lowbit.py --data FOLDER

parts/lowbit/rows.py says what the rows are, texts.py beside it which text trains, calibrates and judges. Trained rows
are runs of reflux' own stages, peers' are made by llm-compressor in an environment of its own; all are measured by
evaluate's code, each in a process of its own: perplexity, divergence from the full-precision model on held-out prompts,
likelihood of GSM8K's reference solutions, how often answers loop, memory, bits, time of a decoded token.

What is done is kept under --cache: the same command goes on after any interruption, and a second one with other --rows
may work in the same place. It begins nothing when --minutes are over. A row that cannot be made says why.
`machine_taken_by_others` says what a time is worth; times of a machine that was not quiet are taken again by a later
call.

Writes lowbit.json: `table` as in `reflux report --json` and more columns; `not_run`; `differences`, paired bootstraps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.demo import MODEL
from parts.lowbit.measure import MEASUREMENT, NEEDS, PARTS
from parts.lowbit.rows import ENCYCLOPEDIA, IN_DOMAIN, ORDER, OWN, ROWS
from parts.lowbit.texts import PUBLIC, heldout_prompts, judging_text, problems, with_open_template
from parts.lowbit.workshop import FOLDER, PLACES, UnableError, Workshop, digest, kept, reader, subject
from parts.paired import paired_difference

from reflux.components import models

QUIET = 0.05
"""Share of the machine that others may take while tokens are timed."""
SIZES = {"windows": 32, "window_tokens": 512, "answers": 44, "problems": 100, "latency_tokens": 40}
COLUMNS = ("scheme", "role", "latency_p50_ms", "latency_p95_ms", "nll_gsm8k", "loop_rate")
"""Null where their part is not measured."""
PASSAGES = {
    OWN: {"passages": 96, "tokens": 384},
    ENCYCLOPEDIA: {"passages": 372, "tokens": 480},
    IN_DOMAIN: {"passages": 120, "tokens": 480},
}
DIFFERENCES = {
    **{f"nll_gsm8k: {name} - fp32": (name, "fp32", "problems", "problem_nats") for name in ROWS if name != "fp32"},
    "nll_gsm8k: on - off policy": ("w279a8_on_policy", "w279a8_off_policy", "problems", "problem_nats"),
    "kl_heldout_nats: on - off policy": ("w279a8_on_policy", "w279a8_off_policy", "scores", "answer_kl_nats"),
}
"""Title -> two rows, and what of theirs is compared problem by problem or answer by answer."""


@dataclass
class Found:
    """What is there, by row."""

    parts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Row -> part -> what was measured."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Row, or row and part -> why."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default=MODEL)
    options.add_argument("--data", default=os.environ.get("REFLUX_DATA", ""), help="folder of public data; or none")
    options.add_argument("--rows", nargs="+", default=list(ORDER), choices=ROWS, help="made in this order")
    options.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="of all rows, in this order")
    options.add_argument("--minutes", type=float, default=120.0)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--cache", type=Path, default=Path("reflux-data/lowbit"))
    options.add_argument("--venv", type=Path, default=Path("build/lowbit-peers"), help="made for the peers")
    options.add_argument("--torch-index", default="", help="package index of torch alone")
    options.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options.add_argument("--sizes", type=json.loads, default={}, help="JSON laid over SIZES and PASSAGES; for tests")
    options.add_argument("--recipe", type=json.loads, default={}, help="JSON laid over what is trained; for tests")
    given = options.parse_args()
    missing = [name for name in PUBLIC if given.data and not (Path(given.data) / name).is_file()]
    if missing:
        options.error(f"--data {given.data}: has no {missing[0]}; needed are {', '.join(PUBLIC)}")
    sizes = {**SIZES, **PASSAGES, **given.sizes}
    base = with_open_template(given.model, given.cache.absolute() / "model")
    tokenizer = models.load_tokenizer(base)
    shop = Workshop(
        cache=given.cache.absolute(), venv=given.venv.absolute(), base=base, tokenizer=tokenizer,
        data=Path(given.data) if given.data else None, passages={text: sizes[text] for text in PASSAGES},
        recipe=given.recipe, threads=given.threads, torch_index=given.torch_index,
        ends=time.monotonic() + 60 * given.minutes,
    )  # fmt: skip
    text = judging_text(shop.data, tokenizer, sizes["windows"], sizes["window_tokens"])
    judged = {
        "measurement": MEASUREMENT, "base": str(base), "windows": text.pop("windows"),
        "heldout": heldout_prompts(tokenizer, sizes["answers"]),
        "problems": problems(shop.data, tokenizer, sizes["problems"]), "latency_tokens": sizes["latency_tokens"],
    }  # fmt: skip
    found = Found()
    for part in given.parts:
        for name in given.rows:
            add(shop, judged, found, name, part)
            given.out.write_text(json.dumps(result(shop, judged, text, found), indent=1) + "\n")


def add(shop: Workshop, judged: dict[str, Any], found: Found, name: str, part: str) -> None:
    """Make the row's model and measure a part of it, or take what is kept."""
    if name in found.not_run or (part == "problems" and not judged["problems"]):
        return
    try:
        known = {**judged, **taught(shop, judged)}
        spec = {"measurement": MEASUREMENT, "base": known["base"], "name": name, "part": part}
        spec |= {"subject": subject(shop, name), **{what: known[what] for what in NEEDS[part]}}
        identity = {what: value for what, value in spec["subject"].items() if what not in PLACES}
        file, key = shop.cache / "rows" / f"{name}.{part}.json", digest({**spec, "subject": identity})
        had = file.exists()
        measurement = kept(file, key, lambda: measured(shop, spec))
        if part == "times" and had:
            measurement = retaken(shop, spec, file, key, measurement)
        found.parts.setdefault(name, {})[part] = measurement
    except UnableError as error:
        found.not_run[name if part == "scores" else f"{name}: {part}"] = str(error)
        print(f"{name}: {part}: not run: {error}", flush=True)
    else:
        shown = {k: round(v, 4) for k, v in measurement["row"].items() if isinstance(v, float)}
        print(f"{name}: {part}: {shown}", flush=True)


def taught(shop: Workshop, judged: dict[str, Any]) -> dict[str, Any]:
    """The held-out traces with the base's answers, and the file with its hidden states."""
    spec = {name: judged[name] for name in ("measurement", "base", "heldout")}
    spec |= {"part": "teaching", "states": str(shop.cache / "states.safetensors")}
    made = kept(shop.cache / "rows" / "teaching.json", digest(spec), lambda: measured(shop, spec))
    return {"heldout": made["heldout"], "states": spec["states"]}


def retaken(shop: Workshop, spec: dict[str, Any], file: Path, key: str, before: dict[str, Any]) -> dict[str, Any]:
    """Times of a machine that others used are taken again, and the less disturbed ones are kept."""
    taken = before["row"]["machine_taken_by_others"]
    if taken <= QUIET or shop.ends < time.monotonic():
        return before
    now = measured(shop, spec)
    if now["row"]["machine_taken_by_others"] < taken:
        file.unlink()
    return kept(file, key, lambda: now)


def measured(shop: Workshop, spec: dict[str, Any]) -> dict[str, Any]:
    file = shop.written(f"{os.getpid()}.json", json.dumps(spec))
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(reader(shop))]))
    command = [sys.executable, str(FOLDER / "measure.py"), str(file)]
    return json.loads(shop.process(command, {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})[-1])


def result(shop: Workshop, judged: dict[str, Any], text: dict[str, Any], found: Found) -> dict[str, Any]:
    return {
        "table": [row_of(found, name) for name in ROWS if "scores" in found.parts.get(name, {})],
        "not_run": [{"scheme": name, "reason": reason} for name, reason in found.not_run.items()],
        "differences": {
            title: paired_difference(*(np.array([found.parts[name][part][values]]) for name in (row, base)))
            for title, (row, base, part, values) in DIFFERENCES.items()
            if all(part in found.parts.get(name, {}) for name in (row, base))
        },
        "text": {**text, "windows": len(judged["windows"]), "window_tokens": len(judged["windows"][0])},
        "heldout_prompts": len(judged["heldout"]),
        "problems": len(judged["problems"]),
        "passages": shop.passages,
        "recipe_laid_over": shop.recipe,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": shop.threads,
                    "torch": torch.__version__},
    }  # fmt: skip


def row_of(found: Found, name: str) -> dict[str, Any]:
    """The row of the table, with its ratios to full precision where that has been measured."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    for part in PARTS:
        row |= found.parts[name].get(part, {}).get("row", {})
    full = found.parts.get("fp32", {}).get("scores", {}).get("row")
    if full is not None:
        row["perplexity_ratio"] = row["perplexity"] / full["perplexity"]
        row["memory_ratio"] = held_bytes(row) / held_bytes(full)
    return row


def held_bytes(row: dict[str, Any]) -> float:
    """Of the model as deployed and of its KV cache."""
    return row["memory_bytes"] + row["kv_cache_bytes"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the same command goes on"))  # with what it has started
    main()
