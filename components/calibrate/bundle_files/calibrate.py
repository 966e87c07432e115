"""Check this bundle on real queries: perplexity, latency and outliers of the low-bit path beside its W4A16 path.

    python calibrate.py queries.txt --report report.json

One query per line, or JSONL with a field "text" or "prompt". Needs what requirements.txt lists; reflux itself is in
runtime/.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if (HERE / "runtime").is_dir():
    sys.path.insert(0, str(HERE / "runtime"))

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from reflux.components.algorithms.low_bit import full_precision_activations  # noqa: E402
from reflux.components.bundles.bundle import load_bundle, read_quant_config  # noqa: E402
from reflux.components.bundles.outliers import counting_outliers  # noqa: E402


def read_queries(path: Path, most: int) -> list[str]:
    """The first `most` queries that are not empty."""
    queries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            line = _text(line, f"{path}, line {number}")
        queries.append(line)
    if not queries:
        raise ValueError(f"{path}: holds no query")
    return queries[:most]


def _text(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: no JSON ({error})") from None
    text = (record.get("text") or record.get("prompt")) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: has no text in a field 'text' or 'prompt'")
    return text


@torch.no_grad()
def measure(model: Any, token_ids: list[int]) -> tuple[float, float]:
    """Nats over all tokens but the first, and milliseconds of the forward."""
    input_BT = torch.tensor([token_ids])
    begin = time.perf_counter()
    logits_TV = model(input_BT, position_ids=torch.arange(len(token_ids))[None]).logits[0].float()
    milliseconds = 1000 * (time.perf_counter() - begin)
    return torch.nn.functional.cross_entropy(logits_TV[:-1], input_BT[0, 1:], reduction="sum").item(), milliseconds


def check(queries: list[str]) -> dict[str, Any]:
    """The report: per path perplexity and latency, share of outliers, requests that fallback.py would send to W4A16."""
    config = read_quant_config(HERE)
    tokenizer, model = AutoTokenizer.from_pretrained(HERE), load_bundle(HERE)
    thresholds = {site: entry["outlier_threshold"] for site, entry in config["activations"].items()}
    nats = {"low_bit": 0.0, "w4a16": 0.0}
    milliseconds: dict[str, list[float]] = {"low_bit": [], "w4a16": []}
    shares, tokens, cut = [], 0, 0
    for query in queries:
        whole = tokenizer(query)["input_ids"]
        token_ids = whole[: model.config.max_position_embeddings]
        if len(token_ids) < 2:
            continue
        cut += len(token_ids) < len(whole)
        tokens += len(token_ids) - 1
        with counting_outliers(model, thresholds) as count:
            spent, took = measure(model, token_ids)
        shares.append(count.share)
        nats["low_bit"] += spent
        milliseconds["low_bit"].append(took)
        with full_precision_activations(model):
            spent, took = measure(model, token_ids)
        nats["w4a16"] += spent
        milliseconds["w4a16"].append(took)
    if not tokens:
        raise ValueError("no query has two tokens or more")
    return {
        "queries": len(shares),
        "queries_too_short": len(queries) - len(shares),
        "queries_cut": cut,
        "tokens": tokens,
        "perplexity": {path: math.exp(total / tokens) for path, total in nats.items()},
        "forward_ms_p50": {path: statistics.median(values) for path, values in milliseconds.items()},
        "latency_of": "simulated",
        "outlier_share_mean": statistics.fmean(shares),
        "fallback_requests": sum(share > config["fallback_outlier_share"] for share in shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--most", type=int, default=100, help="queries taken at most")
    parser.add_argument("--report", type=Path, default=Path("calibration_report.json"))
    arguments = parser.parse_args()
    try:
        report = check(read_queries(arguments.queries, arguments.most))
    except (OSError, ValueError) as error:
        sys.exit(f"calibrate.py: {error}")
    arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
