"""The Triton kernel against the reference in double precision: values and gradients, on odd shapes and layouts.

Stated tolerance (objectives.md, rule 11): 1e-5 of the value, or 1e-5 where it is small, in float32; in float16, where
the gradient of each block of logits is rounded once, 2e-3.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import DEVICE, KERNELS_RUN, poison, run_interpreted, runs_the_kernel, starts_the_interpreter
from mixtures import EVERY

from reflux.kernels.allocations import peak_bytes
from reflux.kernels.chunked_jsd import chunked_jsd
from reflux.kernels.chunked_jsd.reference import dense_divergence
from reflux.kernels.divergences import Mixture, jsd
from reflux.kernels.lm_head import LmHead

if KERNELS_RUN:
    from reflux.kernels import lm_head_tiles as tiles
    from reflux.kernels.chunked_jsd.kernel import ChunkedDivergence

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {  # tokens, student's hidden and rows, teacher's hidden and rows, vocabulary
    "one of each": (1, 1, 2, 1, 2, 2),
    "one token": (1, 17, 130, 33, 130, 130),
    "odd": (5, 40, 301, 71, 317, 301),
    "aligned": (3, 80, 320, 96, 336, 320),
    "several blocks of tokens": (67, 20, 70, 12, 72, 70),
}


@pytest.mark.slow
@starts_the_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


Inputs = tuple[torch.Tensor, LmHead, torch.Tensor, LmHead, torch.Tensor]


def inputs(
    tokens: int, width: int, rows: int, teacher_width: int, teacher_rows: int, vocab: int,
    dtype: torch.dtype = torch.float32, teacher_dtype: torch.dtype | None = None, **transform: float,
) -> Inputs:  # fmt: skip
    """Student's hidden states and head, the teacher's, upstream gradient."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    found: list = []
    for d, p, kind in ((width, rows, dtype), (teacher_width, teacher_rows, teacher_dtype or dtype)):
        weight_PD = 3 * torch.randn(p, d, generator=generator) / d**0.5
        found.append(torch.randn(tokens, d, generator=generator).to(DEVICE, kind))
        found.append(LmHead(weight_PD=weight_PD.to(DEVICE, kind), vocab_size=vocab, **transform))
    return *found, torch.randn(tokens, generator=generator).to(DEVICE)


def ours(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead, upstream_N: torch.Tensor,
    mixture: Mixture,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The kernel's values, gradient of the hidden states, gradient of the weight."""
    leaf_ND, leaf_PD = hidden_ND.detach().requires_grad_(), head.weight_PD.detach().requires_grad_()
    loss_N = ChunkedDivergence.apply(leaf_ND, leaf_PD, head, teacher_ND, teacher_head, mixture)
    return loss_N.detach(), *torch.autograd.grad(loss_N, (leaf_ND, leaf_PD), upstream_N)


def theirs(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead, upstream_N: torch.Tensor,
    mixture: Mixture,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The same of the reference, in float64."""
    leaf_ND, leaf_PD = (t.detach().double().requires_grad_() for t in (hidden_ND, head.weight_PD))
    loss_N = dense_divergence(leaf_ND, _with(head, leaf_PD), teacher_ND.double(), _with(teacher_head), mixture)
    return loss_N.detach(), *torch.autograd.grad(loss_N, (leaf_ND, leaf_PD), upstream_N.double())


def _with(head: LmHead, weight_PD: torch.Tensor | None = None) -> LmHead:
    weight_PD = head.weight_PD.double() if weight_PD is None else weight_PD
    return LmHead(weight_PD=weight_PD, vocab_size=head.vocab_size, scale=head.scale, soft_cap=head.soft_cap)


def assert_close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    for ours_, theirs_ in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_.double(), theirs_, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@runs_the_kernel
@EVERY
def test_equals_the_reference(mixture: Mixture):
    arguments = inputs(*SHAPES["odd"])
    assert_close(ours(*arguments, mixture), theirs(*arguments, mixture), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape: tuple[int, ...]):
    arguments = inputs(*shape)
    assert_close(ours(*arguments, jsd(0.3)), theirs(*arguments, jsd(0.3)), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("teacher_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["odd", "aligned"])
def test_float16_with_a_teacher_of_any_type(shape: str, teacher_dtype: torch.dtype):
    arguments = inputs(*SHAPES[shape], torch.float16, teacher_dtype)
    found = ours(*arguments, jsd(0.5))
    assert_close(found, theirs(*arguments, jsd(0.5)), torch.float16)
    assert [t.dtype for t in found] == [torch.float32, torch.float16, torch.float16]


@runs_the_kernel
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not compute in bfloat16")
@EVERY
def test_bfloat16(mixture: Mixture):
    arguments = inputs(70, 96, 1024, 128, 1000, 1000, torch.bfloat16)
    assert_close(ours(*arguments, mixture), theirs(*arguments, mixture), torch.bfloat16)


@runs_the_kernel
@pytest.mark.parametrize("transform", [{"scale": 0.3}, {"scale": 2.5, "soft_cap": 4.0}], ids=str)
def test_transforms_of_the_logits(transform: dict[str, float]):
    arguments = inputs(4, 30, 150, 20, 160, 150, **transform)
    assert_close(ours(*arguments, jsd(0.3)), theirs(*arguments, jsd(0.3)), torch.float32)


@runs_the_kernel
def test_the_public_function_runs_the_kernel():
    *models, _ = inputs(4, 30, 150, 20, 160, 150)
    found_N = chunked_jsd(*models, beta=0.3)
    assert torch.equal(found_N, ChunkedDivergence.apply(models[0], models[1].weight_PD, *models[1:], jsd(0.3)))
    torch.testing.assert_close(found_N, dense_divergence(*models, jsd(0.3)), rtol=1e-5, atol=1e-5)


@runs_the_kernel
def test_a_transform_of_one_model_is_not_the_others():
    hidden_ND, head, teacher_ND, teacher_head, upstream_N = inputs(4, 30, 150, 20, 160, 150)
    capped = LmHead(weight_PD=teacher_head.weight_PD, vocab_size=150, soft_cap=1.5)
    arguments = hidden_ND, head, teacher_ND, capped, upstream_N
    assert_close(ours(*arguments, jsd(0.3)), theirs(*arguments, jsd(0.3)), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize(("block", "programs"), [(7, 1000), (64, 2), (30, 1)])
def test_how_the_vocabulary_is_cut_does_not_matter(block: int, programs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "VOCAB_BLOCK", block)
    monkeypatch.setattr(tiles, "PROGRAMS", programs)
    arguments = inputs(3, 12, 80, 9, 70, 70)
    assert_close(ours(*arguments, jsd(0.5)), theirs(*arguments, jsd(0.5)), torch.float32)


@runs_the_kernel
@pytest.mark.parametrize("change", [lambda t: t.repeat_interleave(2, 1)[:, ::2], lambda t: t.T.contiguous().T])
def test_layout_does_not_matter(change: Callable[[torch.Tensor], torch.Tensor]):
    hidden_ND, head, teacher_ND, teacher_head, _ = inputs(6, 14, 70, 12, 70, 70)
    upstream_N = torch.ones((), device=DEVICE).expand(6)  # what .sum().backward() sends: stride 0
    heads = [LmHead(weight_PD=change(h.weight_PD), vocab_size=70) for h in (head, teacher_head)]
    arguments = change(hidden_ND), heads[0], change(teacher_ND), heads[1], upstream_N
    assert not any(h.weight_PD.is_contiguous() for h in heads)
    assert_close(ours(*arguments, jsd(0.5)), theirs(*arguments, jsd(0.5)), torch.float32)


@runs_the_kernel
@EVERY
@pytest.mark.parametrize("size", [1e-30, 100.0])
def test_extremes_stay_finite(size: float, mixture: Mixture):
    """At 100 most probabilities underflow in float32, on both sides."""
    hidden_ND, head, teacher_ND, teacher_head, upstream_N = inputs(4, 12, 130, 9, 140, 130)
    arguments = hidden_ND * size, head, teacher_ND * size, teacher_head, upstream_N
    found, wanted = ours(*arguments, mixture), theirs(*arguments, mixture)
    assert all(t.isfinite().all() for t in found)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-4, atol=1e-5)


@runs_the_kernel
@EVERY
def test_a_model_and_itself(mixture: Mixture):
    hidden_ND, head, _, _, upstream_N = inputs(4, 12, 130, 9, 140, 130)
    found = ours(hidden_ND, head, hidden_ND, head, upstream_N, mixture)
    assert all(t.abs().max() < 2e-6 for t in found)


@runs_the_kernel
def test_memory_follows_the_block_and_not_the_vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "VOCAB_BLOCK", 64)
    *models, upstream_N = inputs(40, 8, 600, 8, 600, 600)
    hidden_ND, head, teacher_ND, teacher_head = models
    given, leaf_ND = (hidden_ND, head.weight_PD, teacher_ND, teacher_head.weight_PD), hidden_ND.requires_grad_()

    def run() -> tuple[torch.Tensor, ...]:
        loss_N = ChunkedDivergence.apply(leaf_ND, head.weight_PD, head, teacher_ND, teacher_head, jsd(0.5))
        return torch.autograd.grad(loss_N, leaf_ND, upstream_N)

    assert peak_bytes(run, given, torch.device(DEVICE)) < 40 * 600 * 4 / 2  # half of one model's logits alone


@runs_the_kernel
def test_a_broken_token_breaks_no_other():
    hidden_ND, head, teacher_ND, teacher_head, upstream_N = inputs(3, 12, 130, 9, 130, 130)
    whole = ours(hidden_ND, head, teacher_ND, teacher_head, upstream_N, jsd(0.5))
    hidden_ND[1, 5] = torch.nan
    broken = ours(hidden_ND, head, teacher_ND, teacher_head, upstream_N, jsd(0.5))
    assert broken[0][1].isnan()
    for found, wanted in zip(broken[:2], whole[:2], strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@runs_the_kernel
def test_no_tokens_and_tokens_that_count_nothing():
    hidden_ND, head, teacher_ND, teacher_head, upstream_N = inputs(3, 12, 130, 9, 130, 130)
    empty = ours(hidden_ND[:0], head, teacher_ND[:0], teacher_head, upstream_N[:0], jsd(0.5))
    assert [t.shape for t in empty] == [(0,), (0, 12), (130, 12)]
    _, grad_ND, grad_PD = ours(1e4 * hidden_ND, head, teacher_ND, teacher_head, upstream_N * 0, jsd(0.5))
    for gradient in (empty[2], grad_ND, grad_PD):
        assert (gradient == 0).all()
