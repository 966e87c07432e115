"""Last look: does the bundle answer one request twice alike? Sums in another order turn codes over."""

from __future__ import annotations

from typing import Any

import torch

from reflux.pipelines.doctor.finding import Finding

REQUESTS = 4
NEW_TOKENS = 16


@torch.no_grad()
def determinism(model: Any, token_ids: list[int], requests: int = REQUESTS) -> Finding:
    """Ask `model` the same `requests` times, greedily: tokens and logits must be the same to the last bit."""
    first_ids, first_logits_TV = _answer(model, token_ids)
    for request in range(2, requests + 1):
        ids, logits_TV = _answer(model, token_ids)
        if not torch.equal(ids, first_ids):
            place = int((ids != first_ids).nonzero()[0])
            return _differs(f"request {request} of {requests} has another token at place {place} of the answer")
        if not torch.equal(logits_TV, first_logits_TV):
            off = (logits_TV - first_logits_TV).abs().max()
            return _differs(f"request {request} of {requests} has the same tokens and logits that differ by {off:.2g}")
    found = f"{requests} times the same request: {NEW_TOKENS} tokens and their logits are the same"
    return Finding(check="determinism", status="ok", found=found)


def _answer(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] tokens of the answer and [T, V] the logits that they were chosen by. All NEW_TOKENS, without an end."""
    asked = torch.tensor([token_ids])
    done = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return done.sequences[0, len(token_ids) :], torch.cat(done.logits)


def _differs(found: str) -> Finding:
    fix = "dropout in config.json, other threads per request, or a kernel that adds in no fixed order"
    return Finding(check="determinism", status="fail", found=found, fix=fix)
