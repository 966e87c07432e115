"""One model of lowbit.py, measured in a process of its own, by the code that evaluate measures with.

    python measure.py SPEC.json

The last line is JSON. `part` is `teaching` (the base's greedy answers to the held-out prompts, and its hidden states,
which the others are compared with) or one of PARTS, which are kept apart, so that little is lost when time runs out.

Shapes: W windows, T tokens, N decisions, D hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reflux.components import models
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.effective_bits import cost_of_activations, mean_over_weights
from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.losses import forward_kl, log_probabilities
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, frozen_weights
from reflux.components.algorithms.output_head import output_head
from reflux.components.algorithms.packed_linears import packed_linears
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.stored_scheme import stored_weights
from reflux.components.bundles.transformers_bundle import load_deployed
from reflux.components.evaluate.candidates import UNQUANTISED, Candidate
from reflux.components.evaluate.footprint import cache_bytes, deployed_bytes, held_bytes
from reflux.components.evaluate.heldout import Batch, Trace, batches
from reflux.components.evaluate.measure import Decisions, decisions, decode_times_ms, pad_token, text_nats, trace_scores
from reflux.components.evaluate.row import Row

MEASUREMENT = 1
"""Raised when a number gets another meaning: what is kept counts no longer."""
BATCH_TRACES = 4
CHUNK = 64
"""Decisions whose logits exist at once."""
CACHE_TOKENS = 512
"""For which the KV cache is counted."""
SAMPLED = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=64)
"""How the students' own answers are drawn, which loop or find no end."""
ANSWERED = Sampling(temperature=0.0, max_new_tokens=64)


def candidate_of(name: str, subject: dict[str, Any]) -> Candidate:
    """A model as evaluate knows it. `subject` says where it lies and what kind of thing that is."""
    path, kind = Path(subject["path"]), subject["kind"]
    known = {"name": name, "role": subject["role"]}
    if kind == "rounded":
        scheme = Scheme(**subject["scheme"])
        table = policy_table.decode(Path(subject["table"]).read_bytes()) if scheme.needs_policy else None
        return Candidate(**known, scheme=scheme, load=lambda: apply_scheme(models.load_model(path), scheme, table))
    if kind == "checkpoint":
        return Candidate(
            **known, scheme=UNQUANTISED, load=partial(models.load_model, path), stored=stored_weights(path)
        )
    load = load_bundle if kind == "bundle" else load_deployed
    return Candidate(**known, scheme=read_scheme(path), load=partial(load, path))


def teaching(spec: dict[str, Any]) -> dict[str, Any]:
    """The held-out traces with the base's answers. Its hidden states go into the file `spec["states"]`."""
    model, tokenizer = models.load_model(Path(spec["base"])), models.load_tokenizer(Path(spec["base"]))
    with packed_linears(model):
        drawn = answered(model, tokenizer, spec["heldout"], ANSWERED)
    traces = [{**t, "response_token_ids": ids} for t, ids in zip(spec["heldout"], drawn, strict=True)]
    own = decisions(model, output_head(model), batched(traces, tokenizer))
    save_file({f"{index:04}": hidden_ND for index, hidden_ND in enumerate(own.hidden)}, spec["states"])
    return {"heldout": traces}


def answered(model: Any, tokenizer: Any, traces: list[dict[str, Any]], sampling: Sampling) -> list[list[int]]:
    requests = [Request(prompt_token_ids=t["prompt_token_ids"], seed=seed) for seed, t in enumerate(traces)]
    done = rollout(model, requests, sampling, eos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer))
    return [answer.response_token_ids for answer in done]


def batched(traces: list[dict[str, Any]], tokenizer: Any) -> list[Batch]:
    return batches([Trace(**trace) for trace in traces], BATCH_TRACES, pad_token(tokenizer))


def scores(spec: dict[str, Any], candidate: Candidate, tokenizer: Any) -> dict[str, Any]:
    """The row of SCORES, the divergence from the base, and what it is the mean of, answer by answer."""
    held, vocab_size, model = batched(spec["heldout"], tokenizer), len(tokenizer), candidate.load()
    window_WT = torch.tensor(spec["windows"])
    with frozen_weights(model):
        head = output_head(model)
        nats = text_nats(model, head, window_WT, vocab_size)
        own = decisions(model, head, held)
    reference, costs = taught(spec), candidate.costs_of_weights(model)
    row = Row(
        scheme=candidate.name, role=candidate.role, text_nats=nats,
        text_tokens=window_WT.numel() - len(window_WT), traces=trace_scores(held, own, reference, vocab_size),
        layer_errors=[], generations=[], decode_ms=[], latency_of=candidate.latency_of,
        memory_bytes=held_bytes(model) if candidate.on_kernels else deployed_bytes(model, costs, candidate.scheme),
        kv_cache_bytes=cache_bytes(model, candidate.scheme, CACHE_TOKENS),
        effective_bits=mean_over_weights(model, costs).total,
        effective_bits_activation=cost_of_activations(model, candidate.scheme).total,
        quantizer_digest=candidate.digest, outlier_capture=own.outlier_capture,
    )  # fmt: skip
    kl = divergences(held, own, reference, vocab_size)
    tokens = {t["trace_id"]: len(t["response_token_ids"]) for t in spec["heldout"]}
    return {
        "row": {
            "scheme": row.scheme, "role": row.role, **row.scores(), "latency_of": row.latency_of,
            "kl_heldout_nats": sum(kl.values()) / sum(tokens.values()),
            "quantiser": candidate.scheme.as_json() if candidate.stored is None else {"checkpoint": candidate.digest},
        },
        "window_nats": nats,
        "answer_kl_nats": [kl[name] / tokens[name] for name in sorted(kl)],
    }  # fmt: skip


def problems(spec: dict[str, Any], candidate: Candidate, tokenizer: Any) -> dict[str, Any]:
    """Nats per token of the reference solutions, problem by problem."""
    held, model = batched(spec["problems"], tokenizer), candidate.load()
    with frozen_weights(model):
        own = decisions(model, output_head(model), held)
        solved = {s.trace_id: s.nll_nats / s.tokens for s in trace_scores(held, own, own, len(tokenizer))}
    nats = [solved[name] for name in sorted(solved)]
    return {"row": {"nll_gsm8k": mean(nats)}, "problem_nats": nats}


def answers(spec: dict[str, Any], candidate: Candidate, tokenizer: Any) -> dict[str, Any]:
    """How the model's own answers to the held-out prompts end."""
    model = candidate.load()
    ours = spec["subject"]["kind"] in ("rounded", "bundle")  # of others' layers only they know the weights
    with frozen_weights(model), packed_linears(model) if ours else nullcontext():
        drawn = answered(model, tokenizer, spec["heldout"], SAMPLED)
    loops, endless = [ends_in_loop(ids) for ids in drawn], [ids[-1] != tokenizer.eos_token_id for ids in drawn]
    return {"row": {"loop_rate": mean(loops), "budget_exhausted": mean(endless)}}


def taught(spec: dict[str, Any]) -> Decisions:
    """The base's decisions: hidden states as kept, its own head."""
    kept = load_file(spec["states"])
    head = output_head(models.load_model(Path(spec["base"])))
    return Decisions(head=head, hidden=[kept[name] for name in sorted(kept)], layer_outputs=[], outlier_capture=None)


@torch.no_grad()
def divergences(held: list[Batch], own: Decisions, reference: Decisions, vocab_size: int) -> dict[str, float]:
    """Trace id -> KL(T ‖ S), nats, summed over the answer."""
    found: dict[str, float] = {}
    for batch, own_ND, teacher_ND in zip(held, own.hidden, reference.hidden, strict=True):
        kl_N = torch.cat([
            forward_kl(
                log_probabilities(own.head(own_ND[rows]), vocab_size),
                log_probabilities(reference.head(teacher_ND[rows]), vocab_size),
            )
            for rows in (slice(start, start + CHUNK) for start in range(0, len(own_ND), CHUNK))
        ])  # fmt: skip
        found |= {t.trace_id: float(v.sum()) for t, v in zip(batch.traces, batch.split(kl_N), strict=True)}
    return found


def times(spec: dict[str, Any], candidate: Candidate, tokenizer: Any) -> dict[str, Any]:
    """Milliseconds of a decoded token, resident memory, and how much of the machine others took meanwhile."""
    model = candidate.load()
    ctypes.CDLL(None).malloc_trim(0)  # what loading took and gave back
    began, busy, own = time.monotonic(), busy_seconds(), sum(os.times()[:2])
    with frozen_weights(model):
        prompt = spec["heldout"][0]["prompt_token_ids"]
        measured_ms = torch.tensor(decode_times_ms(model, tokenizer, prompt, spec["latency_tokens"]))
    passed = time.monotonic() - began
    others = (busy_seconds() - busy - (sum(os.times()[:2]) - own)) / (passed * (os.cpu_count() or 1))
    status = Path("/proc/self/status").read_text()
    return {
        "row": {
            "latency_p50_ms": float(measured_ms.quantile(0.5)), "latency_p95_ms": float(measured_ms.quantile(0.95)),
            "resident_bytes": int(status.split("VmRSS:")[1].split()[0]) * 1024,
            "machine_taken_by_others": max(0.0, round(others, 3)),
        }
    }  # fmt: skip


PARTS = {"scores": scores, "times": times, "problems": problems, "answers": answers}
NEEDS = {
    "scores": ("windows", "heldout", "states"), "times": ("heldout", "latency_tokens"), "problems": ("problems",),
    "answers": ("heldout",),
}  # fmt: skip
"""Part -> what it is measured on: where that changes, it is measured again."""


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked since it started."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["part"] == "teaching":
        print(json.dumps(teaching(spec)))
        return
    candidate, tokenizer = candidate_of(spec["name"], spec["subject"]), models.load_tokenizer(Path(spec["base"]))
    print(json.dumps(PARTS[spec["part"]](spec, candidate, tokenizer), allow_nan=False))


if __name__ == "__main__":
    main()
