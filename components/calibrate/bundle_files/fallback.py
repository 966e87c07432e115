"""Answer requests with this bundle; one whose prompt has too many outliers takes another path: the same weights with
activations in full precision, or the model that this one was made from.

    python fallback.py "Why is the sky blue?"
    python fallback.py --full-precision FOLDER "Why is the sky blue?"     a folder or GGUF file; its digest is checked

An outlier is an activation beyond the threshold stored at calibration, counted over tokens and sites while the prompt
is read. Above `fallback_outlier_share` of quant_config.json the other path answers. Both paths are counted.
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
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from reflux.components.algorithms.low_bit import full_precision_activations  # noqa: E402
from reflux.components.bundles.bundle import load_bundle, read_quant_config  # noqa: E402
from reflux.components.bundles.outliers import counting_outliers  # noqa: E402
from reflux.components.content_digest import digest  # noqa: E402


class Server:
    """The bundle's model with both paths; `answered` counts requests by path. ValueError if `full_precision` is not the
    model that the bundle was made from.
    """

    def __init__(self, folder: Path = HERE, full_precision: Path | None = None) -> None:
        config = read_quant_config(folder)
        self.original = None if full_precision is None else load_original(full_precision, config["full_precision"])
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), load_bundle(folder)
        self.thresholds = {site: entry["outlier_threshold"] for site, entry in config["activations"].items()}
        self.allowed_share = config["fallback_outlier_share"]
        self.answered: Counter[str] = Counter()

    def answer(self, prompt: str, max_new_tokens: int = 96) -> dict[str, Any]:
        """The greedy answer, the path that made it ("low_bit", "w4a16" or "full_precision"), and the prompt's share of
        outliers. ValueError for a prompt that leaves no place for an answer.
        """
        messages = [{"role": "user", "content": prompt}]
        token_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        places = self.model.config.max_position_embeddings
        if len(token_ids) + max_new_tokens > places:
            raise ValueError(
                f"prompt of {len(token_ids)} tokens: with {max_new_tokens} of an answer the model has {places} places"
            )
        with torch.no_grad(), counting_outliers(self.model, self.thresholds) as count:
            self.model.model(torch.tensor([token_ids]), position_ids=torch.arange(len(token_ids))[None])
        if count.share <= self.allowed_share:
            path, text = "low_bit", self._generate(self.model, token_ids, max_new_tokens)
        elif self.original is not None:
            path, text = "full_precision", self._generate(self.original, token_ids, max_new_tokens)
        else:
            path = "w4a16"
            with full_precision_activations(self.model):
                text = self._generate(self.model, token_ids, max_new_tokens)
        self.answered[path] += 1
        return {"text": text, "path": path, "outlier_share": count.share}

    def _generate(self, model: Any, token_ids: list[int], max_new_tokens: int) -> str:
        inputs = {
            "input_ids": torch.tensor([token_ids]),
            "attention_mask": torch.ones(1, len(token_ids), dtype=torch.long),
        }
        ends = {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        own = self.model.generation_config  # a model may end its answers with more tokens than the tokenizer's one
        ends |= {name: value for name in ends if (value := getattr(own, name)) is not None}
        ids = model.generate(**inputs, **ends, max_new_tokens=max_new_tokens, do_sample=False)
        return self.tokenizer.decode(ids[0, len(token_ids) :], skip_special_tokens=True)


def load_original(place: Path, expected: str) -> Any:
    """The model in full precision at `place`, if it is the one of that digest."""
    if not place.exists():
        raise ValueError(f"--full-precision {place}: no such file or folder")
    found = digest(place)
    if found != expected:
        raise ValueError(f"--full-precision {place}: is {found}, and this bundle was made from {expected}")
    folder, gguf = (place, {}) if place.is_dir() else (place.parent, {"gguf_file": place.name})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="+")
    parser.add_argument("--full-precision", type=Path, metavar="MODEL", help="what the bundle was made from")
    arguments = parser.parse_args()
    try:
        server = Server(full_precision=arguments.full_precision)
        for prompt in arguments.prompt:
            print(json.dumps(server.answer(prompt)))
    except (OSError, ValueError) as error:
        sys.exit(f"fallback.py: {error}")
    print(json.dumps({"answered": dict(server.answered)}))


if __name__ == "__main__":
    main()
