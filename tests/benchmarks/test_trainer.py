"""The comparison of trainers: its own side on the tiny model, and its account of memory. TRL's side is run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_tiny_model

from reflux.components import models
from reflux.components.algorithms.losses import beta_jsd

pytestmark = pytest.mark.slow
SIDES = Path(__file__).resolve().parents[2] / "benchmarks" / "parts" / "trainer"
ALLOCATIONS = """
import torch
from side import ROLLOUTS, Allocations

allocations = Allocations()
model = torch.nn.Linear(1000, 1000, bias=False)
before = torch.zeros(500_000)
allocations.begin()
with torch.profiler.record_function(ROLLOUTS):
    torch.zeros(1_250_000)
del before
held = torch.zeros(2_000_000)
del held
print(allocations.end(model))
"""


def test_peaks_are_counted_above_what_was_there_before() -> None:
    done = subprocess.run([sys.executable, "-c", ALLOCATIONS], cwd=SIDES, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1].replace("'", '"'))
    assert found["rollout_peak_mb"] == pytest.approx(5.0, abs=0.01)
    assert found["above_floor_mb"] == pytest.approx(2.0, abs=0.01)  # 8 - 2 that went, less the 4 of a gradient


def test_our_side_answers_with_the_loss_and_what_a_step_took(tiny_model: Path, tmp_path: Path) -> None:
    teacher = save_tiny_model(tmp_path / "teacher", seed=1)
    prompts = [[1, 40 + number, 90, 17] for number in range(8)]
    spec = {
        "student": str(tiny_model), "teacher": str(teacher), "prompts": prompts, "texts": [], "chat": False,
        "eos_token": "<|end|>", "new_tokens": 6, "batch": 4, "threads": 1, "beta": 0.5, "learning_rate": 1e-4,
        "settings": {"micro_batch_sequences": 1, "activation_checkpointing": "full"},
    }  # fmt: skip
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    batch = [{"prompt": [1, 50, 60], "completion": [70, 80]}, {"prompt": [1, 9], "completion": [11, 12, 13]}]
    asked = [{"do": "loss", "sequences": batch}, {"do": "step"}, {"do": "memory"}, {"do": "step"}]
    done = subprocess.run(
        [sys.executable, str(SIDES / "side_reflux.py"), str(file)],
        input="".join(json.dumps(command) + "\n" for command in asked), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT "))
    ready, loss, _, memory, step = map(json.loads, lines)
    assert ready == {"ready": True, "torch": torch.__version__}
    assert loss["loss_nats"] == pytest.approx(expected_loss(tiny_model, teacher, batch), rel=1e-4)
    assert 4 <= step["completion_tokens"] <= 4 * 6
    assert min(step["rollout_s"], step["scored_s"], step["cpu_s"]) > 0
    assert step["rss_bytes"] > 100e6
    assert 0 < memory["above_floor_mb"] < 5
    assert 0 < memory["rollout_peak_mb"] < 5


def expected_loss(student: Path, teacher: Path, batch: list[dict[str, Any]]) -> float:
    """By each model's own forward, one unpadded sequence after another."""
    vocab_size, total, tokens = len(models.load_tokenizer(student)), 0.0, 0
    for sequence in batch:
        ids, count = torch.tensor([sequence["prompt"] + sequence["completion"]]), len(sequence["completion"])
        with torch.no_grad():
            of_student, of_teacher = (
                models.load_model(path)(input_ids=ids).logits[0, -count - 1 : -1, :vocab_size].log_softmax(-1)
                for path in (student, teacher)
            )
        total += float(beta_jsd(of_student, of_teacher, 0.5).sum())
        tokens += count
    return total / tokens
