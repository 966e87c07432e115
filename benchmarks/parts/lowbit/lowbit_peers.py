"""Quantise a model with llm-compressor, in an environment of its own: its pins clash with reflux'.

    python lowbit_peers.py METHOD MODEL CALIBRATION.json OUT

METHOD is gptq, gptq_zero_points, awq or autoround (W4A16 in groups of 64, symmetric but for the second; OUT is a
checkpoint of compressed-tensors), or smoothquant (the smoothed model, in full precision). CALIBRATION.json is a list
of lists of token ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP_SIZE = 64


def w4a16(symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP_SIZE}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


METHODS: dict[str, Callable[[], list[Any]]] = {
    "gptq": lambda: [GPTQModifier(**w4a16())],
    "gptq_zero_points": lambda: [GPTQModifier(**w4a16(symmetric=False))],
    "awq": lambda: [AWQModifier(), QuantizationModifier(**w4a16())],
    "autoround": lambda: [AutoRoundModifier(**w4a16(), iters=20, enable_torch_compile=False)],
    "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.5)],
}


def main() -> None:
    method, path, calibration, out = sys.argv[1:]
    if not torch.accelerator.is_available():  # AWQ pins what it caches, which torch refuses without one
        torch.Tensor.pin_memory = lambda self, *_, **__: self
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = json.loads(Path(calibration).read_text())
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    oneshot(
        model=model, dataset=data, recipe=METHODS[method](), max_seq_length=max(map(len, ids)),
        num_calibration_samples=len(ids), shuffle_calibration_samples=False, pad_to_max_length=False,
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=method != "smoothquant")
    AutoTokenizer.from_pretrained(path).save_pretrained(out)


if __name__ == "__main__":
    main()
