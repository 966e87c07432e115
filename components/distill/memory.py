"""What training will need of the machine's memory, before a weight is loaded. Bytes of one process:

    always      BASE + 4 S + 4 T + 12 M          float32 student and teacher; AdamW's two moments and the average
    a forward   + r L + r L' + A N + C           rounded weights and their gradients, activations, one chunk of logits
    a step      + 4 M                            gradients of the master weights
    rollouts    + 8 L + K R                      weights rounded in float32 and packed, the cache of R answers

S, T parameters of student and teacher, a rotated student with a head of its own; M trained ones of the decoder (with
adapters, theirs); L weights of its linear layers, L' those that move; r bytes of a number in compute_dtype; N places of
a micro-batch, padding included. With fsdp2 a process holds its share of M, of the decoder in S, rounds in each forward,
and has all of the decoder while rollouts are made.

A is per place and layer `a D + b F` bytes, D hidden and F intermediate channels, with the coefficients below: counted
from the tensors that autograd saves on two shapes, 576/1536 and 1024/2816, which they fit within 2 %. With
activation_checkpointing a layer has its input, 4 D, and one layer is there whole; `selective` adds what the products
gave, counted for a third as many key channels as hidden ones. A cache in KIVI's forms adds r (4 D - 2 k + 2 t), counted
in the same way: keys and values of each head stand there twice, k channels before heads share them, under a mask over
the t tokens of a sequence twice. The largest of the three lines counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from reflux.components import models, processes
from reflux.components.algorithms.chunked_loss import CHUNK_TOKENS
from reflux.components.algorithms.hadamard import NO_ROTATION
from reflux.components.algorithms.kv_forms import KV_FORMS
from reflux.components.algorithms.low_bit import FULL_PRECISION
from reflux.components.algorithms.recomputation import NONE, SELECTIVE
from reflux.components.memory import available_gib
from reflux.components.models import ModelShape

from .config import DistillConfig
from .student import device_of

BASE = 0.55 * 2**30
"""The process with what it imports, its buffers, and what the allocator does not give back."""
OF_ACTIVATIONS = {("float32", True): (54, 22), ("float32", False): (36, 16), ("bfloat16", True): (48, 12),
                  ("bfloat16", False): (36, 16)}  # fmt: skip
"""(compute_dtype, activations are rounded) -> bytes per hidden and per intermediate channel."""
OF_PRODUCTS = {"float32": (19, 8), "bfloat16": (10, 4)}
"""The same of what products and attention gave."""
OF_LOGITS = 7
"""Float32 tensors [tokens of a chunk, vocabulary] that are there together: logits, log-probabilities, gradients."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Need:
    """GiB at the three moments that may be the highest."""

    forward: float
    step: float
    rollouts: float

    @property
    def peak(self) -> float:
        return max(self.forward, self.step, self.rollouts)

    def described(self) -> str:
        return (
            f"training needs about {self.peak:.1f} GiB (forward {self.forward:.1f}, step {self.step:.1f}, rollouts "
            f"{self.rollouts:.1f})"
        )


def need(
    config: DistillConfig, student: ModelShape, teacher: ModelShape, compute_dtype: str, *, count: int = 1
) -> Need:
    """What one of `count` processes will take for models of these shapes."""
    share = count if config.parallelism == "fsdp2" else 1
    narrow = 2 if compute_dtype == "bfloat16" else 4
    quantised = config.weight_bits < FULL_PRECISION
    masters = _adapters(config, student) if config.lora_rank else student.decoder
    state = (12 if config.ema_decay else 8) * masters / share
    held = student.parameters + (student.shared if config.rotation != NO_ROTATION else 0)
    whole = 4 * (held - student.decoder * (1 - 1 / share)) + 4 * teacher.parameters
    always = BASE + whole + state
    rounded = (2 * narrow * student.linear if share == 1 else 0) if quantised else 0
    a, b = OF_ACTIVATIONS[compute_dtype, config.activation_bits < FULL_PRECISION]
    of_layer = a * student.hidden + b * student.intermediate
    if config.kv_cache in KV_FORMS and KV_FORMS[config.kv_cache].group:
        of_layer += narrow * (4 * student.hidden - 2 * student.kv_channels + 2 * config.max_sequence_tokens)
    layers = of_layer * student.layers
    if config.activation_checkpointing != NONE:
        a, b = OF_PRODUCTS[compute_dtype] if config.activation_checkpointing == SELECTIVE else (0, 0)
        layers = ((4 + a) * student.hidden + b * student.intermediate) * student.layers + of_layer
    compared = 8 * student.hidden * student.layers if config.compares_layers else 0  # scored rows of both models
    places = min(config.micro_batch_sequences, config.batch_sequences // count) * config.max_sequence_tokens
    chunk = OF_LOGITS * 4 * CHUNK_TOKENS * student.vocabulary
    slots = min(config.rollout_slots or config.rollout_batch, config.rollout_batch) // count or 1
    cache = slots * config.max_sequence_tokens * student.layers * student.kv_channels * 2 * 4
    gathered = 4 * student.decoder * (1 - 1 / share)
    rolling = 8 * student.linear + cache + gathered + 3 * 4 * slots * student.vocabulary
    return Need(
        forward=(always + rounded + (layers + compared) * places + chunk) / GIB,
        step=(always + 4 * masters / share + rounded / 2) / GIB,
        rollouts=(always + (rolling if config.on_policy_fraction else 4 * student.linear)) / GIB,
    )


def need_of(config: DistillConfig, student: Path, teacher: Path) -> Need:
    """What this process, one of torchrun's if there are several, will take for the models behind two paths."""
    dtype = str(models.compute_dtype(config.compute_dtype, device_of(config).type)).removeprefix("torch.")
    shapes = models.model_shape(student), models.model_shape(teacher)
    return need(config, *shapes, dtype, count=processes.started())


def require_memory(needed: Need, config: DistillConfig) -> str:
    """A remark on what the training will need. ValueError if this machine has less."""
    device = device_of(config)
    limit = config.memory_gib or (torch.cuda.mem_get_info(device)[0] / GIB if device.type == "cuda" else _own_share())
    if limit is not None and needed.peak > limit:
        of = "distill.memory_gib allows" if config.memory_gib else "are available here to each process"
        raise ValueError(
            f"distill.micro_batch_sequences {config.micro_batch_sequences}, max_sequence_tokens "
            f"{config.max_sequence_tokens}: {needed.described()}, and {limit:.1f} GiB {of}; take smaller ones, "
            "activation_checkpointing full, lora_rank, fsdp2 over more processes, or set memory_gib"
        )
    return f"distill: {needed.described()}"


def _own_share() -> float | None:
    """GiB of this machine for each of the processes on it; all look before one of them takes any."""
    free = processes.gathered(available_gib())[processes.rank()]
    return free and free / processes.started_here()


def _adapters(config: DistillConfig, student: ModelShape) -> float:
    """Parameters of all adapters, as if every linear layer had one and were hidden by intermediate channels."""
    linears = 7 * student.layers
    return config.lora_rank * linears * (student.hidden + student.intermediate)
