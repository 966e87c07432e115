"""Who makes the student's rollouts: an engine is a function from requests to answers, by the student as it stands.

`local` runs the student's own low-bit forward; `vllm` gives the student's rounded weights to a vLLM in this process.
Another forward, say one on packed weights, is one more function in ENGINES.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.low_bit import LowBitLinear
from reflux.components.algorithms.packed_linears import packed_linears
from reflux.components.algorithms.rollouts import Engine, Request, Rollout, rollout
from reflux.components.models import hugging_face_folder

from .adapters import MARK

VLLM_MEMORY_SHARE = 0.3
"""Of the GPU's memory that vLLM takes for its copy of the student and its cache; the rest is for training."""


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """What an engine is made from."""

    student: Any
    path: Path
    """The student before training: a folder in Hugging Face layout, or a GGUF file."""
    eos_token_id: int
    vocab_size: int
    """Of the tokenizer."""
    slots: int
    """Sequences under way at once; 0: as many as are asked for."""
    longest: int
    """Tokens of the longest prompt and its answer."""


def local_engine(rolling: Rolling) -> Engine:
    """The student in this process, its weights rounded, and on a CPU packed, once for each call."""

    def answer(requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        rolling.student.eval()
        with packed_linears(rolling.student):
            return rollout(
                rolling.student,
                requests,
                sampling,
                eos_token_id=rolling.eos_token_id,
                vocab_size=rolling.vocab_size,
                slots=rolling.slots,
            )

    return answer


def vllm_engine(rolling: Rolling) -> Engine:
    """vLLM in this process, which is given the student's weights at each call and reads a group's prompt once.

    ValueError if vLLM is not installed. vLLM does not round activations (the configuration refuses a student that
    does), and its sums depend on the batch: a resumed run is not the same to the last bit.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the weights would have to be sent to another process
    try:
        from vllm import LLM, SamplingParams, TokensPrompt
    except ImportError as error:
        raise ValueError(
            f"distill.rollout_engine 'vllm': vLLM cannot be imported ({error}); 'local' needs none"
        ) from error
    served = LLM(
        model=str(hugging_face_folder(rolling.path)),
        dtype=str(next(rolling.student.parameters()).dtype).removeprefix("torch."),
        max_model_len=rolling.longest,
        gpu_memory_utilization=VLLM_MEMORY_SHARE,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        **({"max_num_seqs": rolling.slots} if rolling.slots else {}),
    )
    pads = rolling.student.config.vocab_size > rolling.vocab_size

    def answer(requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        served.collective_rpc("reload_weights", kwargs={"weights_iterator": deployed_weights(rolling.student)})
        served.reset_prefix_cache()  # its keys and values are those of the weights before
        drawn_from = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=[rolling.eos_token_id],
                allowed_token_ids=list(range(rolling.vocab_size)) if pads else None,
                seed=request.seed,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
        done = served.generate(prompts, drawn_from, use_tqdm=False)
        return [
            _rollout(request, list(output.outputs[0].token_ids), rolling.eos_token_id)
            for request, output in zip(requests, done, strict=True)
        ]

    return answer


ENGINES: dict[str, Callable[[Rolling], Engine]] = {"local": local_engine, "vllm": vllm_engine}


@torch.no_grad()
def deployed_weights(student: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name -> weight as the model without quantisers would hold it, each low-bit weight rounded, one after another."""
    low_bit = {f"{name}.weight": module for name, module in student.named_modules() if isinstance(module, LowBitLinear)}
    for name, p in student.named_parameters():
        if MARK not in name and not name.startswith("policy.") and not name.endswith(".log_clip_OG"):
            yield name, low_bit[name].rounded() if name in low_bit else p.detach()


def _rollout(request: Request, response: list[int], eos_token_id: int) -> Rollout:
    ended = response[-1] == eos_token_id
    return Rollout(
        prompt_token_ids=request.prompt_token_ids,
        response_token_ids=response,
        stop_reason="eos" if ended else "length",
    )
