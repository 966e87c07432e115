"""One form of a bundle, for deployed.py, measured in a process of its own. The last line is JSON.

python form.py FORM BUNDLE BASE TOKENS WINDOW_TOKENS
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from reflux.components import sources
from reflux.components.algorithms.output_head import output_head
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.transformers_bundle import load_deployed
from reflux.components.evaluate.candidates import UNQUANTISED
from reflux.components.evaluate.footprint import cache_bytes, held_bytes
from reflux.components.evaluate.measure import decode_times_ms, text_nats
from reflux.components.evaluate.text import evaluation_text
from reflux.components.models import load_model, load_tokenizer

CACHE_TOKENS = 512
PROMPT_TOKENS = 64


def main() -> None:
    form, bundle, base, tokens, window_tokens = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(bundle)
        if form.startswith("weights_only"):
            place = weights_only(place, Path(scratch) / "bundle")
        print(json.dumps(measured(form, place, sources.fetch(base), int(tokens), int(window_tokens))))


def loaded(form: str, bundle: Path, base: Path) -> Any:
    if form == "fp32":
        return load_model(base)
    if form == "imitated":
        return load_bundle(bundle)
    return load_deployed(bundle, torch.float32 if form.endswith("float32") else torch.bfloat16)


def weights_only(bundle: Path, folder: Path) -> Path:
    """The bundle with the same files and a scheme that leaves activations alone."""
    folder.mkdir()
    for file in bundle.iterdir():
        if file.name != "quant_config.json":
            (folder / file.name).symlink_to(file.absolute())
    scheme = read_scheme(bundle).weights_only()
    config = json.loads((bundle / "quant_config.json").read_text())
    config |= {"scheme": scheme.as_json(), "scheme_sha256": scheme.digest(), "activations": {}}
    (folder / "quant_config.json").write_text(json.dumps(config))
    return folder


def measured(form: str, bundle: Path, base: Path, tokens: int, window_tokens: int) -> dict[str, float]:
    tokenizer = load_tokenizer(bundle)
    model = loaded(form, bundle, base)
    text = evaluation_text(None, tokenizer, windows=1, window_tokens=window_tokens)
    times = sorted(decode_times_ms(model, tokenizer, text.window_WT[0, :PROMPT_TOKENS].tolist(), tokens))
    ctypes.CDLL(None).malloc_trim(0)  # what loading took and gave back
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) * 1024
    scheme = UNQUANTISED if form == "fp32" else read_scheme(bundle)
    begin = time.perf_counter()
    nats = sum(text_nats(model, output_head(model), text.window_WT, len(tokenizer)))
    return {
        "decode_ms_p50": times[len(times) // 2],
        "window_s": time.perf_counter() - begin,
        "held_bytes": held_bytes(model),
        "kv_bytes": cache_bytes(model, scheme, CACHE_TOKENS),
        "resident_bytes": resident,
        "perplexity": math.exp(nats / text.scored_tokens),
    }


if __name__ == "__main__":
    main()
