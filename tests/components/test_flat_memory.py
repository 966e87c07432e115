"""collect_traces holds one shard at a time: ten times the prompts do not need more memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAME = 1.03
"""Ratio of two peaks of about 650 MB, most of it libraries: 1.005 was measured, 1.13 where answers were kept."""

HANDED_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""What is freed goes back to the system at once, so that the peak is what was needed and not what was kept in hand."""

RUN = """
import json, resource, sys
from pathlib import Path
from stage_writers import writer_for
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.stage import run

model, prompts, store = sys.argv[1:]
config = CollectTracesConfig(teacher=model, prompts_uri=prompts, max_new_tokens=24, batch_size=50, top_k=250)
writer = writer_for(Path(store), "collect_traces", config)
metrics = run(config, traces=writer)
writer.commit(metrics)
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"peak_mb": peak_mb, "prompts": metrics["prompts"], "tokens": metrics["tokens"]}))
"""


@pytest.mark.slow
def test_the_peak_is_the_same_for_200_and_2000_prompts(tiny_model: Path, tmp_path: Path) -> None:
    few, many = (_peak(tiny_model, tmp_path, count) for count in (200, 2000))
    assert (few["prompts"], many["prompts"]) == (200, 2000)
    assert many["tokens"] > 9 * few["tokens"]
    assert many["peak_mb"] < SAME * few["peak_mb"]


def _peak(model: Path, folder: Path, count: int) -> dict[str, float]:
    prompts = folder / f"{count}.jsonl"
    rows = ({"prompt_id": f"p{i}", "prompt": f"What comes after {i:04d}, and why?"} for i in range(count))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", RUN, str(model), str(prompts), str(folder / f"store-{count}")]
    tests = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests)} | HANDED_BACK
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])
