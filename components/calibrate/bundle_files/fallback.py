"""Answer requests with this bundle; one whose prompt has too many outliers takes the W4A16 path of the same weights.

    python fallback.py "Why is the sky blue?"

An outlier is an activation beyond the threshold stored at calibration, counted over tokens and sites while the prompt
is read. Above `fallback_outlier_share` of quant_config.json the answer is made without rounding activations. Both
paths are counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if (HERE / "runtime").is_dir():
    sys.path.insert(0, str(HERE / "runtime"))

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from reflux.components.algorithms.low_bit import full_precision_activations  # noqa: E402
from reflux.components.bundles.bundle import load_bundle, read_quant_config  # noqa: E402
from reflux.components.bundles.outliers import counting_outliers  # noqa: E402


class Server:
    """The bundle's model with both paths; `answered` counts requests by path."""

    def __init__(self, folder: Path = HERE) -> None:
        config = read_quant_config(folder)
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), load_bundle(folder)
        self.thresholds = {site: entry["outlier_threshold"] for site, entry in config["activations"].items()}
        self.allowed_share = config["fallback_outlier_share"]
        self.answered: Counter[str] = Counter()

    def answer(self, prompt: str, max_new_tokens: int = 96) -> dict[str, Any]:
        """The greedy answer, the path that made it ("low_bit" or "w4a16") and the prompt's share of outliers."""
        messages = [{"role": "user", "content": prompt}]
        token_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        with torch.no_grad(), counting_outliers(self.model, self.thresholds) as count:
            self.model.model(torch.tensor([token_ids]), position_ids=torch.arange(len(token_ids))[None])
        if count.share > self.allowed_share:
            path = "w4a16"
            with full_precision_activations(self.model):
                text = self._generate(token_ids, max_new_tokens)
        else:
            path, text = "low_bit", self._generate(token_ids, max_new_tokens)
        self.answered[path] += 1
        return {"text": text, "path": path, "outlier_share": count.share}

    def _generate(self, token_ids: list[int], max_new_tokens: int) -> str:
        inputs = {
            "input_ids": torch.tensor([token_ids]),
            "attention_mask": torch.ones(1, len(token_ids), dtype=torch.long),
        }
        ends = {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        own = self.model.generation_config  # a model may end its answers with more tokens than the tokenizer's one
        ends |= {name: value for name in ends if (value := getattr(own, name)) is not None}
        ids = self.model.generate(**inputs, **ends, max_new_tokens=max_new_tokens, do_sample=False)
        return self.tokenizer.decode(ids[0, len(token_ids) :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="+")
    arguments = parser.parse_args()
    try:
        server = Server()
    except (OSError, ValueError) as error:
        sys.exit(f"fallback.py: {error}")
    for prompt in arguments.prompt:
        print(json.dumps(server.answer(prompt)))
    print(json.dumps({"answered": dict(server.answered)}))


if __name__ == "__main__":
    main()
