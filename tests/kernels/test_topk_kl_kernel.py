"""The Triton kernel against the reference in double precision: values and gradients, on odd shapes and layouts.

Stated tolerance (objectives.md, rule 11): 1e-5 of the value, or 1e-5 where it is small, in float32; in float16, where
the gradient of each block of logits is rounded once, 2e-3.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import DEVICE, KERNELS_RUN, poison, run_interpreted, runs_the_kernel, starts_the_interpreter

from reflux.kernels.allocations import peak_bytes
from reflux.kernels.divergences import divergence, jsd
from reflux.kernels.lm_head import LmHead
from reflux.kernels.topk_kl import bucket_logits, bucketed, topk_kl

if KERNELS_RUN:
    from reflux.kernels import lm_head_tiles as tiles
    from reflux.kernels.topk_kl.kernel import BucketLogits

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {  # tokens, hidden, vocabulary, rows of the head, kept
    "one of each": (1, 1, 2, 2, 1),
    "one token": (1, 33, 130, 130, 5),
    "odd": (5, 71, 301, 317, 4),
    "aligned": (3, 80, 320, 336, 4),
    "several blocks of tokens": (131, 20, 70, 70, 3),
    "all words kept": (3, 9, 67, 80, 67),
    "all but one": (3, 9, 67, 67, 66),
}


@starts_the_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def inputs(
    tokens: int, width: int, vocab: int, rows: int, kept: int, dtype: torch.dtype = torch.float32, **transform: float
) -> tuple[torch.Tensor, LmHead, torch.Tensor, torch.Tensor]:
    """Hidden states, head, ids in no order, upstream gradient."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden_ND = torch.randn(tokens, width, generator=generator)
    weight_PD = torch.randn(rows, width, generator=generator) / width**0.5
    ids_NK = torch.stack([torch.randperm(vocab, generator=generator)[:kept] for _ in range(tokens)])
    upstream_NB = torch.randn(tokens, kept + 1, generator=generator)
    head = LmHead(weight_PD=(3 * weight_PD).to(DEVICE, dtype), vocab_size=vocab, **transform)
    return hidden_ND.to(DEVICE, dtype), head, ids_NK.to(DEVICE), upstream_NB.to(DEVICE)


def ours(
    hidden_ND: torch.Tensor, head: LmHead, ids_NK: torch.Tensor, upstream_NB: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The kernel's bucket logits, gradient of the hidden states, gradient of the weight."""
    leaf_ND, leaf_PD = hidden_ND.detach().requires_grad_(), head.weight_PD.detach().requires_grad_()
    buckets_NB = BucketLogits.apply(leaf_ND, leaf_PD, head, ids_NK)
    return buckets_NB.detach(), *torch.autograd.grad(buckets_NB, (leaf_ND, leaf_PD), upstream_NB)


def theirs(
    hidden_ND: torch.Tensor, head: LmHead, ids_NK: torch.Tensor, upstream_NB: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same of the reference, in float64."""
    leaf_ND, leaf_PD = (t.detach().double().requires_grad_() for t in (hidden_ND, head.weight_PD))
    same = LmHead(weight_PD=leaf_PD, vocab_size=head.vocab_size, scale=head.scale, soft_cap=head.soft_cap)
    buckets_NB = bucketed(same.logits(leaf_ND), ids_NK)
    # nothing flows to a tail without words
    upstream_NB = upstream_NB.double().masked_fill(buckets_NB == -torch.inf, 0.0)
    return buckets_NB.detach(), *torch.autograd.grad(buckets_NB, (leaf_ND, leaf_PD), upstream_NB)


def assert_close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    for ours_, theirs_ in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_.double(), theirs_, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@runs_the_kernel
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...]):
    arguments = inputs(*shape, dtype)
    found = ours(*arguments)
    assert_close(found, theirs(*arguments), dtype)
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype]


@runs_the_kernel
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not compute in bfloat16")
def test_bfloat16():
    arguments = inputs(70, 96, 1000, 1024, 8, torch.bfloat16)
    assert_close(ours(*arguments), theirs(*arguments), torch.bfloat16)


@runs_the_kernel
@pytest.mark.parametrize("transform", [{"scale": 0.3}, {"soft_cap": 2.0}, {"scale": 2.5, "soft_cap": 4.0}], ids=str)
def test_transforms_of_the_logits(transform: dict[str, float]):
    arguments = inputs(4, 30, 150, 160, 6, **transform)
    assert_close(ours(*arguments), theirs(*arguments), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("block", [7, 64, 300, 4096])
def test_blocks_of_the_vocabulary_in_backward(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "VOCAB_BLOCK", block)
    arguments = inputs(3, 12, 301, 317, 9)
    assert_close(ours(*arguments), theirs(*arguments), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("programs", [1, 2, 1000])
def test_parts_of_the_vocabulary_in_forward(programs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "PROGRAMS", programs)
    arguments = inputs(3, 12, 301, 317, 9)
    assert_close(ours(*arguments), theirs(*arguments), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("ids", [range(60, 70), [0, 63, 64, 127, 128, 299], [299]], ids=str)
def test_kept_tokens_side_by_side_and_at_the_edges_of_blocks(ids: list[int]):
    hidden_ND, head, _, _ = inputs(3, 12, 300, 300, 1)
    ids_NK = torch.tensor([list(ids)] * 3, dtype=torch.int32, device=DEVICE).flip(-1)
    upstream_NB = torch.ones((), device=DEVICE).expand(3, len(ids) + 1)  # what .sum().backward() sends: stride 0
    arguments = hidden_ND, head, ids_NK.long(), upstream_NB
    assert_close(ours(hidden_ND, head, ids_NK, upstream_NB), theirs(*arguments), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize(
    "change", [lambda t: t.repeat_interleave(2, 1)[:, ::2], lambda t: t.T.contiguous().T, lambda t: t.repeat(2, 1)[::2]]
)
def test_layout_does_not_matter(change: Callable[[torch.Tensor], torch.Tensor]):
    hidden_ND, head, ids_NK, upstream_NB = inputs(6, 14, 70, 70, 3)
    hidden_ND, weight_PD = change(hidden_ND), change(head.weight_PD)
    assert not (hidden_ND.is_contiguous() and weight_PD.is_contiguous())
    arguments = hidden_ND, LmHead(weight_PD=weight_PD, vocab_size=70), ids_NK, upstream_NB
    assert_close(ours(*arguments), theirs(*arguments), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4])
def test_extremes_stay_finite(size: float):
    hidden_ND, head, ids_NK, upstream_NB = inputs(4, 12, 130, 140, 5)
    arguments = hidden_ND * size, head, ids_NK, upstream_NB
    found, wanted = ours(*arguments), theirs(*arguments)
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)


@runs_the_kernel
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_public_function_runs_the_kernel(beta: float):
    hidden_ND, head, ids_NK, _ = inputs(6, 20, 140, 150, 4)
    teacher_NV = torch.randn(6, 140, generator=torch.Generator().manual_seed(1)).to(DEVICE).log_softmax(-1)
    teacher_NB, leaf_ND = bucketed(teacher_NV, ids_NK), hidden_ND.requires_grad_()
    found_N = topk_kl(leaf_ND, head, ids_NK, teacher_NB[:, :-1], teacher_NB[:, -1], beta=beta)
    wanted_N = divergence(bucketed(head.logits(leaf_ND), ids_NK).log_softmax(-1), teacher_NB, jsd(beta))
    torch.testing.assert_close(found_N, wanted_N, rtol=1e-5, atol=1e-5)
    found_ND, wanted_ND = (torch.autograd.grad(loss_N.sum(), leaf_ND)[0] for loss_N in (found_N, wanted_N))
    torch.testing.assert_close(found_ND, wanted_ND, rtol=1e-5, atol=1e-5)


@runs_the_kernel
def test_a_type_that_kernels_do_not_compute_in_is_refused():
    hidden_ND, head, ids_NK, _ = inputs(2, 12, 70, 70, 3)
    wide = LmHead(weight_PD=head.weight_PD.double(), vocab_size=70)
    with pytest.raises(ValueError, match=r"hidden_ND in torch\.float64: a kernel takes"):
        bucket_logits(hidden_ND.double(), wide, ids_NK)


@runs_the_kernel
def test_a_broken_token_breaks_no_other():
    hidden_ND, head, ids_NK, upstream_NB = inputs(3, 12, 130, 130, 4)
    whole = ours(hidden_ND, head, ids_NK, upstream_NB)
    hidden_ND[1, 5] = torch.nan
    broken = ours(hidden_ND, head, ids_NK, upstream_NB)
    assert broken[0][1].isnan().all()
    for found, wanted in zip(broken[:2], whole[:2], strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@runs_the_kernel
def test_tokens_that_count_nothing_have_no_gradient():
    hidden_ND, head, ids_NK, upstream_NB = inputs(3, 12, 130, 130, 4)
    _, grad_ND, grad_PD = ours(hidden_ND * 1e4, head, ids_NK, upstream_NB * 0)
    assert (grad_ND == 0).all()
    assert (grad_PD == 0).all()


@runs_the_kernel
def test_no_tokens():
    hidden_ND, head, ids_NK, upstream_NB = inputs(1, 12, 130, 130, 4)
    empty = ours(hidden_ND[:0], head, ids_NK[:0], upstream_NB[:0])
    assert [t.shape for t in empty] == [(0, 5), (0, 12), (130, 12)]
    assert (empty[2] == 0).all()


@runs_the_kernel
def test_memory_follows_the_block_and_not_the_vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "VOCAB_BLOCK", 64)
    hidden_ND, head, ids_NK, upstream_NB = inputs(40, 8, 1200, 1200, 4)
    given, leaf_ND = (hidden_ND, head.weight_PD, ids_NK, upstream_NB), hidden_ND.requires_grad_()

    def run() -> tuple[torch.Tensor, ...]:
        buckets_NB = BucketLogits.apply(leaf_ND, head.weight_PD, head, ids_NK)
        return torch.autograd.grad(buckets_NB, leaf_ND, upstream_NB)

    assert peak_bytes(run, given, torch.device(DEVICE)) < 40 * 1200 * 4 / 4  # a quarter of the logits alone


@runs_the_kernel
def test_twice_the_same_is_bit_for_bit_the_same():
    arguments = inputs(9, 33, 301, 317, 7)
    for first, second in zip(ours(*arguments), ours(*arguments), strict=True):
        assert torch.equal(first, second)
