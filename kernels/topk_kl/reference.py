"""The buckets of a sparse teacher in plain PyTorch: the definition, the CPU path and the kernel's oracle.

Shapes: N tokens, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import torch


def bucketed(values_NV: torch.Tensor, token_ids_NK: torch.Tensor) -> torch.Tensor:
    """[N, K + 1] the values (logits or log-probabilities) of the named tokens and, last, the logsumexp of all others:
    -inf where none is left.
    """
    kept_NK = values_NV.gather(-1, token_ids_NK)
    rest_N1 = values_NV.scatter(-1, token_ids_NK, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([kept_NK, rest_N1], dim=-1)
