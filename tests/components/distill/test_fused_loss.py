"""Where kernels run, distill's loss is that of the chunks: value, gradient and what is watched beside it. That the
chunks are right is in test_objective.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import DEVICE, run_interpreted, runs_the_kernel, starts_the_interpreter
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from reflux.components import models
from reflux.components.algorithms.kernel_head import kernel_head
from reflux.components.algorithms.output_head import ModelHead, output_head
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.observed import Observed
from reflux.components.distill.stored import StoredBuckets


@pytest.mark.slow
@starts_the_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def model(rows: int, of_family: Any = LlamaConfig, **options: Any) -> Any:
    config = of_family(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.7, **options,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(DEVICE)


def sequences(stored: bool) -> list[Sequence]:
    """Three; with a teacher's top 5 of each scored token, or without."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for length, first in ((9, 4), (5, 2), (12, 3)):
        plain = Sequence(token_ids=torch.randint(3, 200, (length,), generator=generator).tolist(), first_scored=first)
        ids_TK = torch.stack([torch.randperm(250, generator=generator)[:5] for _ in range(plain.scored)])
        logprobs_TB = torch.randn(plain.scored, 6, generator=generator).log_softmax(-1)
        found.append(
            replace(plain, teacher=StoredBuckets(token_ids_TK=ids_TK, logprobs_TB=logprobs_TB)) if stored else plain
        )
    return found


@runs_the_kernel
@pytest.mark.parametrize(
    ("objective", "stored", "fused", "soft_cap"),
    [
        ("beta_jsd", False, True, True),
        ("0.5*skew_forward_kl + reverse_kl", False, True, False),
        ("forward_kl + cross_entropy", False, False, False),
        ("forward_kl", True, True, True),
        ("0.5*beta_jsd + cross_entropy + next_token", True, True, False),
    ],
)
def test_equals_the_chunks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, objective: str, stored: bool, fused: bool, soft_cap: bool
) -> None:
    tokenizer = models.load_tokenizer(tiny_model)
    torch.manual_seed(0)
    family: dict[str, Any] = (
        {"of_family": Gemma2Config, "head_dim": 8, "final_logit_softcapping": 3.0} if soft_cap else {}
    )
    student, teacher = (model(len(tokenizer) + padding, **family) for padding in (3, 11))
    config = DistillConfig(
        objective="beta_jsd" if stored else objective, trace_objective=objective if stored else "", score_prompts=False,
        weight_bits=16, activation_bits=16, activation="plain",
    )  # fmt: skip
    loss, chunked = (DistillationLoss(student, teacher, tokenizer, config) for _ in range(2))
    # a head that is any function is asked for its logits
    chunked.student = replace(chunked.student, head=chunked.student.head.__call__)
    norm_D = student.model.norm.weight.requires_grad_()
    found = []
    for of in (loss, chunked):
        observed = Observed()
        total = of(sequences(stored), observed)
        found.append((total.detach(), torch.autograd.grad(total, norm_D)[0], observed.means()))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-5, atol=1e-5)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5)
    made, logits = [], ModelHead.__call__
    monkeypatch.setattr(ModelHead, "__call__", lambda head, x_ND: made.append(len(x_ND)) or logits(head, x_ND))
    loss(sequences(stored))
    assert (made == []) == fused  # no logits where a kernel serves


@runs_the_kernel
def test_what_is_more_than_one_matrix_is_asked_itself() -> None:
    head, device = output_head(model(64)), torch.device(DEVICE)
    assert kernel_head(head, 60, device).vocab_size == 60
    assert kernel_head(head.__call__, 60, device) is None
    biased = replace(head, projection=torch.nn.Linear(16, 64))
    assert kernel_head(biased, 60, device) is None


@starts_the_interpreter
def test_off_the_gpu_the_head_is_asked_itself() -> None:
    assert kernel_head(output_head(model(64)), 60, torch.device("cpu")) is None
