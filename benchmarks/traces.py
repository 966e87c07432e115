"""What a stored token costs, how exact it is, and how fast traces are written and read: make bench-traces.

SmolLM2-135M-Instruct answers some of our own prompts (`--prompts`, about a second each on two cores) through
collect_traces. Bytes are those of the Parquet columns of the top-k store over the response tokens. Errors are against
the fp32 log-probabilities of a forward over the finished answers. The peer stores the same tokens at the same k, with
as few bits as reach our largest and our mean error.

Throughput is that of parts/traces/throughput.py: medians over rounds in turn, against pyarrow.parquet with its defaults
and with our encodings; the last line has the smaller ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from parts.demo import MODEL, in_turn
from parts.stage_artifact import made
from parts.traces import fitted_logprobs, throughput
from parts.traces.arrow_numbers import flat
from parts.traces.throughput import COLUMNS

from reflux.components import models, sources
from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig

K = 32
"""Tokens kept at each place of an answer."""
BUDGET_K = 50
"""As many as DistillKit's README pairs with its budget pick."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default=MODEL, help="that answers")
    options.add_argument("--prompts", type=int, default=36, help="prompts that are answered")
    options.add_argument("--tokens", type=int, default=128, help="longest answer, tokens")
    options.add_argument("--shards", type=int, default=40, help="that are written and read")
    options.add_argument("--rounds", type=int, default=7, help="of writing and reading")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="reflux-bench-") as folder:
        traces = collected(Path(folder), given.model, given.prompts, given.tokens)
        table = traces.table("traces")
        tokens = len(table["response_token_ids"].combine_chunks().flatten())
        size = parquet_bytes(traces, COLUMNS)
        print(f"{table.num_rows} answers, {tokens} response tokens of {given.model}, k = {K}\n")
        print("| store | bytes per token | largest error, nats | mean error, nats |\n|---|---|---|---|")
        vocab_size = int(traces.schema_metadata("traces")["vocab_size"])
        sizes_and_errors(given.model, table, {name: size[name] / tokens for name in COLUMNS}, vocab_size)
        ratios = throughput.ratios(Path(folder), table, vocab_size, shards=given.shards, rounds=given.rounds)
    result = {"bytes_per_token": round(sum(size[name] for name in COLUMNS) / tokens, 2)}
    print(json.dumps(result | {name: round(value, 3) for name, value in ratios.items()}))


def collected(folder: Path, model: str, prompts: int, tokens: int) -> Artifact:
    """Traces of the first prompts of each dimension, in turn."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in in_turn(prompts)))
    config = CollectTracesConfig(teacher=model, prompts_uri=str(file), max_new_tokens=tokens, top_k=K, batch_size=12)
    return made(folder, "collect_traces", config, output="traces")


def parquet_bytes(traces: Artifact, columns: list[str]) -> dict[str, int]:
    """Compressed bytes of the columns over all shards, page headers included."""
    total = dict.fromkeys(columns, 0)
    for shard in traces.shards("traces"):
        metadata = pq.read_metadata(pa.BufferReader(traces.store.read(shard.object)))
        for group, column in product(range(metadata.num_row_groups), range(metadata.num_columns)):
            chunk = metadata.row_group(group).column(column)
            if (name := chunk.path_in_schema.split(".")[0]) in total:
                total[name] += chunk.total_compressed_size
    return total


def sizes_and_errors(model: str, table: pa.Table, ours: dict[str, float], vocab_size: int) -> None:
    stored_NK, ids_NK = (flat(table[name]).reshape(-1, K) for name in ("topk_logprobs", "topk_token_ids"))
    exact_NK, top_NK, top_ids_NK = exact_logprobs(model, table, ids_NK.astype(np.int64))
    error = np.abs(stored_NK.astype(np.float32) - exact_NK)
    parts = ", ".join(f"{name.removeprefix('topk_')} {value:.1f}" for name, value in ours.items())
    row(f"reflux topk ({parts})", sum(ours.values()), error)
    row("raw: uint16 ids, float16 log-probabilities, float32 tail", 4 * K + 4, error)
    named = table.select(COLUMNS)
    row("plain pyarrow, its defaults", written_bytes(named) / len(ids_NK), error)
    row("plain pyarrow, zstd", written_bytes(named, compression="zstd") / len(ids_NK), error)

    choices = [
        fitted_logprobs.Fit(exact_k=exact_k, terms=terms, bits=bits)
        for exact_k, terms, bits in product(
            (1, 2, 4, 8), ((0, 1, "sqrt"), (0, 1, 2, "sqrt"), (0, 1, 2, 3, "sqrt")), range(13)
        )
    ]
    errors = {fit: np.abs(fitted_logprobs.decoded(exact_NK, fit) - exact_NK) for fit in choices}
    for label, worst in (("largest", np.max), ("mean", np.mean)):
        reached = [fit for fit in choices if worst(errors[fit]) <= worst(error)]
        if not reached:
            row(f"DistillKit, no setting reaches our {label} error", float("nan"), np.full(1, np.nan))
            continue
        best = min(reached, key=lambda fit: fit.bytes_per_token(K, vocab_size))
        peer_row(f"DistillKit at our {label} error", best, exact_NK, ids_NK, errors[best], vocab_size)
    budget = np.abs(fitted_logprobs.decoded(top_NK, fitted_logprobs.BUDGET) - top_NK)
    peer_row("DistillKit's budget pick, k = 50", fitted_logprobs.BUDGET, top_NK, top_ids_NK, budget, vocab_size)


def peer_row(
    name: str, fit: fitted_logprobs.Fit, logprobs_NK: np.ndarray, ids_NK: np.ndarray, error: np.ndarray, vocab_size: int
) -> None:
    data = fitted_logprobs.packed(logprobs_NK, ids_NK, fit, vocab_size)
    width = data.shape[1]
    assert width == fit.bytes_per_token(logprobs_NK.shape[1], vocab_size)
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data), [None, pa.py_buffer(data)])
    zipped = written_bytes(pa.table({"packed": column}), compression="zstd", use_dictionary=False) / len(data)
    terms = len(fit.terms)
    row(f"{name} ({fit.exact_k} exact, {terms} terms, {fit.bits} bits; {width} before zstd)", zipped, error)


def row(name: str, size: float, error: np.ndarray) -> None:
    print(f"| {name} | {size:.1f} | {error.max():.4f} | {error.mean():.5f} |")


def exact_logprobs(name: str, table: pa.Table, ids_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In fp32, from one forward over each prompt and answer: the log-probabilities of the stored ids, and the largest
    BUDGET_K with their ids.
    """
    path = sources.fetch(name)
    model, vocab_size = models.load_model(path), len(models.load_tokenizer(path))
    parts: list[tuple[np.ndarray, ...]] = []
    done = 0
    for trace in table.select(["prompt_token_ids", "response_token_ids"]).to_pylist():
        prompt, answer = trace["prompt_token_ids"], trace["response_token_ids"]
        with torch.no_grad():
            logits_TP = model(input_ids=torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        logprobs_TV = logits_TP[:, :vocab_size].float().log_softmax(-1)
        top, top_ids = logprobs_TV.topk(BUDGET_K)
        at_ids = logprobs_TV.gather(1, torch.from_numpy(ids_NK[done : done + len(answer)]))
        parts.append((at_ids.numpy(), top.numpy(), top_ids.numpy()))
        done += len(answer)
    exact_NK, top_NK, top_ids_NK = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return exact_NK, top_NK, top_ids_NK


def written_bytes(table: pa.Table, **options: Any) -> int:
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, **options)
    metadata = pq.read_metadata(pa.BufferReader(stream.getvalue()))
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    return sum(group.column(n).total_compressed_size for group in groups for n in range(metadata.num_columns))


if __name__ == "__main__":
    main()
