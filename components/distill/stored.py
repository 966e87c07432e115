"""The teacher's distributions as the trace store holds them, ready for a loss: one form for each store.

Shapes: T response tokens, K kept tokens, U places for distinct tokens, D draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch


@dataclass(frozen=True, kw_only=True)
class StoredBuckets:
    """Of the `topk` store: a distribution over K + 1 buckets, which any objective may use."""

    token_ids_TK: torch.Tensor
    logprobs_TB: torch.Tensor
    """[T, K + 1] nats: the kept tokens, and last everything else together."""

    def first(self, tokens: int) -> StoredBuckets:
        return StoredBuckets(token_ids_TK=self.token_ids_TK[:tokens], logprobs_TB=self.logprobs_TB[:tokens])


@dataclass(frozen=True, kw_only=True)
class StoredDraws:
    """Of the `sampled` store: what is linear in the teacher's probabilities is unbiased, nothing else is known."""

    token_ids_TU: torch.Tensor
    weights_TU: torch.Tensor
    """Share of the draws, an unbiased estimate of the probability; 0 in places that are not used."""
    entropy_nats_T: torch.Tensor

    def first(self, tokens: int) -> StoredDraws:
        return StoredDraws(
            token_ids_TU=self.token_ids_TU[:tokens],
            weights_TU=self.weights_TU[:tokens],
            entropy_nats_T=self.entropy_nats_T[:tokens],
        )


Stored = StoredBuckets | StoredDraws
Row = Mapping[str, pa.Scalar]


def _topk(row: Row) -> StoredBuckets:
    ids, logprobs = (_flat(row[name]).reshape(len(row[name]), -1) for name in ("topk_token_ids", "topk_logprobs"))
    buckets = np.concatenate([logprobs, _flat(row["tail_logmass"])[:, None]], axis=1, dtype=np.float32)
    return StoredBuckets(token_ids_TK=torch.from_numpy(ids.astype(np.int64)), logprobs_TB=torch.from_numpy(buckets))


def _sampled(row: Row) -> StoredDraws:
    ids, counts = _flat(row["sampled_token_ids"]).astype(np.int64), _flat(row["sampled_counts"]).astype(np.float32)
    lengths = row["sampled_counts"].values.value_lengths().to_numpy()
    used_TU = np.arange(lengths.max()) < lengths[:, None]
    ids_TU, counts_TU = np.zeros(used_TU.shape, np.int64), np.zeros(used_TU.shape, np.float32)
    ids_TU[used_TU], counts_TU[used_TU] = ids, counts
    return StoredDraws(
        token_ids_TU=torch.from_numpy(ids_TU),
        weights_TU=torch.from_numpy(counts_TU / counts_TU.sum(-1, keepdims=True)),
        entropy_nats_T=torch.from_numpy(_flat(row["entropy_nats"]).copy()),
    )


def _sampled_is_whole(row: Row) -> bool:
    """Whether ids and counts go together and every token was drawn for."""
    ids, counts = (row[name].values.value_lengths().to_numpy() for name in ("sampled_token_ids", "sampled_counts"))
    return np.array_equal(ids, counts) and bool((ids > 0).all())


@dataclass(frozen=True, kw_only=True)
class StoreReader:
    columns: tuple[str, ...]
    """Each has one entry per response token."""
    decode: Callable[[Row], Stored]
    is_whole: Callable[[Row], bool] = lambda _row: True

    def covers(self, row: Row, tokens: int) -> bool:
        """Whether the row has a distribution for each of its response tokens."""
        return all(len(row[name].values) == tokens for name in self.columns) and self.is_whole(row)


READERS = {
    "topk": StoreReader(columns=("topk_token_ids", "topk_logprobs", "tail_logmass"), decode=_topk),
    "sampled": StoreReader(
        columns=("sampled_token_ids", "sampled_counts", "entropy_nats"), decode=_sampled, is_whole=_sampled_is_whole
    ),
}


def _flat(rows: pa.ListScalar) -> np.ndarray:
    """The numbers of one trace, whatever lists they stand in."""
    values = rows.values
    while pa.types.is_nested(values.type):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False)
