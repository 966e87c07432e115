"""The teacher's next-token distribution as a few draws from it, counted: unbiased where a top-k cut is not.

Sparse logit sampling, arXiv 2503.16870, with q = p: a token drawn c times in D has the weight c / D, whose expectation
is its probability, so every sum over the vocabulary that is linear in the teacher's probabilities (the cross-entropy
and its gradient) is unbiased. The paper draws independently; here each of D equal slices of the probability mass gives
one draw. The expectations are the same, the variance of a count is never larger, and a token of probability p is
drawn within 2 of p * D times.

Shapes: N tokens, V vocabulary of the tokenizer, D draws, U places for distinct tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_DRAWS = 65_535
"""What the store's uint16 counts to."""


@dataclass(frozen=True, kw_only=True)
class SampledTeacher:
    token_ids_NU: Tensor
    """int32, distinct and ascending within a row; 0 in places that are not used."""
    counts_NU: Tensor
    """int32, how often each was drawn; 0 in places that are not used. A row sums to D."""


def sampled_counts(
    logits_NV: Tensor, draws: int, *, vocab_size: int, generators: Sequence[torch.Generator]
) -> SampledTeacher:
    """Draws from softmax(logits) at temperature 1, D for each of N rows, each row by its own generator on the CPU.

    Columns from `vocab_size` on are padding of the embedding and are never drawn. ValueError for no draws, more than a
    uint16 counts, or another number of generators than rows.
    """
    if not 1 <= draws <= MOST_DRAWS:
        raise ValueError(f"draws {draws}: must be between 1 and {MOST_DRAWS}")
    if len(generators) != len(logits_NV):
        raise ValueError(f"{len(logits_NV)} tokens with {len(generators)} generators: one for each is needed")
    mass_NV = logits_NV[:, :vocab_size].float().softmax(-1).double().cumsum(-1)
    jitter_ND = torch.stack([torch.rand(draws, generator=g, dtype=torch.float64) for g in generators])
    slices_ND = (torch.arange(draws) + jitter_ND).to(mass_NV.device) / draws
    ids_ND = torch.searchsorted(mass_NV, slices_ND * mass_NV[:, -1:], right=True).clamp(max=vocab_size - 1)
    return _counted(ids_ND)


def joined(parts: Sequence[SampledTeacher]) -> SampledTeacher:
    """The tokens of all parts in order, with as many places as the widest has."""
    width = max(part.counts_NU.shape[1] for part in parts)

    def stacked(rows: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])

    return SampledTeacher(
        token_ids_NU=stacked([part.token_ids_NU for part in parts]),
        counts_NU=stacked([part.counts_NU for part in parts]),
    )


def _counted(ids_ND: Tensor) -> SampledTeacher:
    """Runs of equal ids, which ascend because the slices do, become one place each."""
    new_ND = torch.ones_like(ids_ND, dtype=torch.bool)
    new_ND[:, 1:] = ids_ND[:, 1:] != ids_ND[:, :-1]
    place_ND = new_ND.cumsum(-1) - 1
    empty_NU = torch.zeros(len(ids_ND), int(place_ND.max()) + 1, dtype=torch.int64, device=ids_ND.device)
    return SampledTeacher(
        token_ids_NU=empty_NU.scatter(-1, place_ND, ids_ND).int(),
        counts_NU=empty_NU.scatter_add(-1, place_ND, torch.ones_like(ids_ND)).int(),
    )
