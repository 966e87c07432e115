"""A model that scores sequences: its final hidden states at the scored tokens, and its output head apart from it.

Shapes: R rows, T tokens, N scored tokens of all sequences, one sequence after another, D hidden, V vocabulary of
the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.chunked_loss import CHUNK_TOKENS
from reflux.components.algorithms.hadamard import in_common_basis
from reflux.components.algorithms.layer_errors import watching_layers
from reflux.components.algorithms.losses import log_probabilities
from reflux.components.algorithms.outlier_capture import watching_capture
from reflux.components.algorithms.output_head import OutputHead, final_hidden_states, output_head
from reflux.components.algorithms.written_losses import drawn_from
from reflux.components.sequences import batched, packed, padded

from .examples import Sequence
from .observed import Observed

CAPTURE_TOKENS = 16
"""Tokens of a forward of which caught outliers are counted, at every site: less than a hundredth of its time."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    model: Any
    head: OutputHead
    vocab_size: int
    pad: int
    compute_dtype: torch.dtype
    """Of the passes through the layers; logits are float32 whatever it is."""
    row_tokens: int = 0
    """Longest row of a forward in which sequences stand end to end; 0: each has a row of its own."""
    site_bits: Mapping[str, int] = field(default_factory=dict)
    """Of a student whose activations have two grids: bits of each site, to watch which outliers are caught."""

    def hidden(
        self,
        sequences: Several[Sequence],
        see: Callable[[Tensor], None] | None = None,
        observed: Observed | None = None,
    ) -> Tensor:
        """[N, D] the hidden states from which the scored tokens are predicted. `see` is called with the same rows of
        every decoder layer's output, the first layer first; `observed` takes which outliers were caught.
        """
        token_ids = [s.token_ids for s in sequences]
        mask: Tensor | None = None
        if self.row_tokens:
            input_RT, position_RT, places = packed(token_ids, self.pad, self.row_tokens)
        else:
            input_RT, mask, position_RT = padded(token_ids, self.pad)
            places = [(row, 0) for row in range(len(sequences))]
        mask = None if mask is None else mask.to(self.device)
        input_RT, position_RT = input_RT.to(self.device), position_RT.to(self.device)
        narrow = self.compute_dtype != torch.float32

        def scored(hidden_RTD: Tensor) -> Tensor:
            parts = [
                hidden_RTD[row, begin + s.first_scored - 1 : begin + len(s.token_ids) - 1]
                for s, (row, begin) in zip(sequences, places, strict=True)
            ]
            return torch.cat(parts)

        def seen(layer_RTD: Tensor) -> None:
            assert see is not None
            see(in_common_basis(self.model, scored(layer_RTD)))

        watching = nullcontext() if see is None else watching_layers(self.model, seen)
        every = -(-sum(map(len, token_ids)) // CAPTURE_TOKENS)
        capturing: AbstractContextManager[list[Tensor]] = nullcontext([])
        if observed is not None and self.site_bits:
            capturing = watching_capture(self.model, self.site_bits, *_tokens(places, token_ids, every))
        with (
            torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=narrow),
            watching,
            capturing as captured,
        ):
            hidden_RTD = final_hidden_states(self.model, input_RT, mask, position_RT)
        if observed is not None and captured:
            observed.add({"outlier_capture": torch.cat(captured)}, every)
        return scored(hidden_RTD.float())

    def log_probabilities(self, hidden_nD: Tensor) -> Tensor:
        """[n, V] of a few rows: all of V is there at once."""
        return log_probabilities(self.head(hidden_nD), self.vocab_size)

    @torch.no_grad()
    def written_nats(
        self, hidden_ND: Tensor, token_ids_N: Tensor, *, temperature: float = 1.0, top_p: float = 1.0
    ) -> Tensor:
        """[N] log-probability of each written token under the distribution that `drawn_from` makes."""
        parts = [
            drawn_from(self.log_probabilities(hidden_nD), temperature, top_p).gather(-1, ids_n[:, None])[:, 0]
            for hidden_nD, ids_n in zip(hidden_ND.split(CHUNK_TOKENS), token_ids_N.split(CHUNK_TOKENS), strict=True)
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def sequence_nats(
        self, sequences: Several[Sequence], *, at_once: int, temperatures: Several[float] = (1.0,), top_p: float = 1.0
    ) -> list[list[Tensor]]:
        """For each temperature the log-probabilities of each sequence's scored tokens, nats; `at_once` sequences a
        forward.
        """
        nats: list[list[Tensor]] = [[] for _ in temperatures]
        for batch in batched(sequences, at_once):
            hidden_ND, token_ids_N = self.hidden(batch), scored_token_ids(batch).to(self.device)
            for kept, temperature in zip(nats, temperatures, strict=True):
                nats_N = self.written_nats(hidden_ND, token_ids_N, temperature=temperature, top_p=top_p)
                kept += nats_N.cpu().split([s.scored for s in batch])
        return nats

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def _tokens(places: list[tuple[int, int]], token_ids: list[list[int]], every: int) -> tuple[list[int], list[int]]:
    """Rows and columns of one token in so many, over all sequences."""
    tokens = [(row, begin + t) for (row, begin), ids in zip(places, token_ids, strict=True) for t in range(len(ids))]
    rows, columns = zip(*tokens[::every], strict=True)
    return list(rows), list(columns)


def scorer(
    model: Any,
    tokenizer: Any,
    compute_dtype: torch.dtype,
    *,
    row_tokens: int = 0,
    site_bits: Mapping[str, int] | None = None,
) -> Scorer:
    """With the model's own head and the transforms behind it, padding and words of the tokenizer."""
    return Scorer(
        model=model,
        head=output_head(model),
        vocab_size=len(tokenizer),
        pad=tokenizer.pad_token_id or 0,
        compute_dtype=compute_dtype,
        row_tokens=row_tokens,
        site_bits=site_bits or {},
    )


def scored_token_ids(sequences: Several[Sequence]) -> Tensor:
    """[N] the tokens that are predicted."""
    return torch.tensor([token for s in sequences for token in s.token_ids[s.first_scored :]], dtype=torch.int64)
