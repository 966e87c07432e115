"""The output head and the Jensen-Shannon divergence of 8 x 192 tokens in chunks, value and gradient, ours or Liger's: a
part of make bench, each in the environment that has it.

    python head_loss.py reflux|liger THREADS [CHUNK]

Shapes: N tokens, C tokens of a chunk, D hidden, P words.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from side import Allocations, answer

TOKENS, WIDTH, WORDS, BETA, ROUNDS = 8 * 192, 576, 49_152, 0.5, 3

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(student's hidden states [N, D], head [P, D], teacher's hidden states, head) -> summed nats."""


def of_reflux() -> Loss:
    from reflux.components.algorithms.chunked_loss import chunked_loss
    from reflux.components.algorithms.losses import beta_jsd
    from reflux.components.algorithms.wide_product import wide_product

    def loss(
        student_ND: torch.Tensor, head_PD: torch.Tensor, teacher_ND: torch.Tensor, teacher_PD: torch.Tensor
    ) -> torch.Tensor:
        def token_loss(logits_CP: torch.Tensor, rows: slice) -> torch.Tensor:
            with torch.no_grad():
                teacher_CP = wide_product(teacher_ND[rows], teacher_PD).log_softmax(-1)
            return beta_jsd(logits_CP.log_softmax(-1), teacher_CP, BETA)

        return chunked_loss(student_ND, lambda hidden_CD: wide_product(hidden_CD, head_PD), token_loss)

    return loss


def of_liger() -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    fused = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA, compiled=False, chunk_size=int(sys.argv[3])
    )
    labels_N = torch.zeros(TOKENS, dtype=torch.int64)
    return lambda student_ND, head_PD, teacher_ND, teacher_PD: (
        fused(student_ND, head_PD, teacher_ND, teacher_PD, labels_N) * TOKENS
    )


def main() -> None:
    allocations = Allocations()
    torch.set_num_threads(int(sys.argv[2]))
    generator = torch.Generator().manual_seed(0)
    head_PD, teacher_PD = (0.2 * torch.randn(WORDS, WIDTH, generator=generator) for _ in range(2))
    student = torch.nn.Embedding(TOKENS, WIDTH)
    teacher_ND = torch.randn(TOKENS, WIDTH, generator=generator)
    student.weight.data = teacher_ND + 0.3 * torch.randn(TOKENS, WIDTH, generator=generator)
    loss = {"reflux": of_reflux, "liger": of_liger}[sys.argv[1]]()
    seconds, cpu_s = [], []
    for number in range(ROUNDS + 1):
        student.weight.grad = None
        begin, cpu = time.perf_counter(), time.process_time()
        if number == 0:
            allocations.begin()
        value = loss(student.weight, head_PD, teacher_ND, teacher_PD)
        value.backward()
        if number == 0:
            memory = allocations.end(student)
        else:
            seconds.append(time.perf_counter() - begin)
            cpu_s.append(time.process_time() - cpu)
    answer({
        "nats": float(value) / TOKENS, "gradient": float(student.weight.grad.norm()),
        "tokens_per_s": TOKENS / statistics.median(seconds), "tokens_per_cpu_s": TOKENS / statistics.median(cpu_s),
        "above_mb": memory["above_floor_mb"],
    })  # fmt: skip


if __name__ == "__main__":
    main()
