"""How many prompts of each dimension are asked, which ones, and on which side of the split they stand.

A prompt's side depends on its id alone: a student that is trained again must not find yesterday's training prompts
among those that judge it. So a dimension's share of held-out prompts is exact only where there are prompts to choose
from; elsewhere it is about right, and reported.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt, load_prompts, require_both_splits

DIMENSIONS = ("multi_hop", "tool_use", "uncertainty", "long_range", "value_alignment")
TRIVIAL = "trivial"
"""Prompts such as a greeting, on which a student should not start to reason."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    prompts: list[Prompt]
    rejected: list[dict[str, Any]]
    """Rows of the table `rejected`."""
    composition: list[dict[str, Any]]
    """Rows of the table `composition`."""


def asked_prompts(path: Path, tokenizer: Any, config: CollectTracesConfig, context_tokens: int) -> Asked:
    """The prompts of a source that the teacher will be asked. ValueError for a source that cannot be used."""
    usable, rejected = load_prompts(
        path,
        tokenizer,
        heldout_fraction=config.heldout_fraction,
        max_prompt_tokens=config.max_prompt_tokens,
        max_total_tokens=context_tokens - config.max_new_tokens,
    )
    asked = chosen_prompts(
        usable,
        per_dimension=config.prompts_per_dimension,
        trivial_share=config.trivial_share,
        heldout_fraction=config.heldout_fraction,
    )
    require_both_splits(path, asked, config.heldout_fraction)
    return Asked(prompts=asked, rejected=rejected, composition=composition(usable, asked))


def chosen_prompts(
    prompts: list[Prompt], *, per_dimension: int, trivial_share: float, heldout_fraction: float
) -> list[Prompt]:
    """At most `per_dimension` of each dimension, and so many trivial ones that they are `trivial_share` of all; every
    prompt where `per_dimension` is 0. In their order.

    Ids alone decide, so neither the order of a file nor prompts of other dimensions matter, and whoever asks for more
    keeps those chosen before. Held-out and training prompts are chosen apart, in the ratio of the split; where one side
    has too few, the other fills up.
    """
    if not per_dimension:
        return prompts
    by_dimension: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_dimension[prompt.dimension].append(prompt)
    trivial = by_dimension.pop(TRIVIAL, [])
    kept: set[str] = set()
    for own in by_dimension.values():
        kept |= _stratified(own, per_dimension, heldout_fraction)
    trivial_count = round(len(kept) * trivial_share / (1 - trivial_share)) if kept else per_dimension
    kept |= _stratified(trivial, trivial_count, heldout_fraction)
    return [prompt for prompt in prompts if prompt.prompt_id in kept]


def composition(usable: list[Prompt], asked: list[Prompt]) -> list[dict[str, Any]]:
    """One row of the table `composition` per dimension, in order of name."""
    offered = Counter(prompt.dimension for prompt in usable)
    taken = Counter(prompt.dimension for prompt in asked)
    heldout = Counter(prompt.dimension for prompt in asked if prompt.split == "heldout")
    return [
        {
            "dimension": dimension,
            "usable": offered[dimension],
            "asked": taken[dimension],
            "heldout": heldout[dimension],
            "share": taken[dimension] / len(asked),
        }
        for dimension in sorted(offered)
    ]


def share_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """share_NAME of the known dimensions and share_other of the rest, whose names could be anything."""
    shares = {f"share_{name}": 0.0 for name in (*DIMENSIONS, TRIVIAL, "other")}
    for row in rows:
        name = row["dimension"] if row["dimension"] in (*DIMENSIONS, TRIVIAL) else "other"
        shares[f"share_{name}"] += row["share"]
    return shares


def _stratified(prompts: list[Prompt], count: int, heldout_fraction: float) -> set[str]:
    ordered = sorted(prompts, key=lambda prompt: hashlib.sha256(f"choice\0{prompt.prompt_id}".encode()).digest())
    heldout = [prompt.prompt_id for prompt in ordered if prompt.split == "heldout"]
    train = [prompt.prompt_id for prompt in ordered if prompt.split == "train"]
    wanted = round(count * heldout_fraction)
    if count > 1:  # both sides, however small the fraction
        wanted = min(max(wanted, 1), count - 1)
    taken = heldout[:wanted]
    taken += train[: count - len(taken)]
    return {*taken, *heldout[wanted : wanted + count - len(taken)]}
