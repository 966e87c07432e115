"""A step of on-policy distillation beside TRL's DistillationTrainer: make bench.

Both sides train the same decoder layers of SmolLM2-135M-Instruct towards the same teacher (those weights and some
noise) in fp32, on the same prompts in the same order, with the same divergence, AdamW and threads; each in a process of
its own, on the same torch, in turn. `fixed` is 8 prompts of 64 tokens and answers of 192 (an end that is never drawn),
`real` is our own prompts with the ends that the model writes, 192 tokens at most. Both generate for each step the 8
answers that it is made of. SIDES are the settings, the same on both sides: all answers in one forward, and one answer
in each with layers computed again in the backward pass, which takes the least memory.

The last line has two ratios, reflux / TRL, the worse of both workloads and of both pairs of settings: completion tokens
per second of a whole step, and peak memory above parameters, gradients, optimizer state and teacher.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from parts.demo import MODEL, PROMPTS
from parts.trainer.side import MARK, Spec

from reflux.components import models, sources
from reflux.components.records import read_records

ROOT = Path(__file__).parent.parent
PARTS = Path(__file__).parent / "parts" / "trainer"
NOISE = 0.02
"""Of the teacher: share of each weight matrix' own standard deviation."""
BATCH, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 192
NEVER_DRAWN = "<jupyter_script>"
"""A token that the model does not write, so that answers have their full length on either side."""

SIDES: dict[str, dict[str, Any]] = {
    "reflux": {"micro_batch_sequences": BATCH, "activation_checkpointing": "selective"},
    "reflux, lean": {"micro_batch_sequences": 1, "activation_checkpointing": "full"},
    "TRL": {
        "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "gradient_checkpointing": False
    },
    "TRL, lean": {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH, "gradient_checkpointing": True
    },
}  # fmt: skip
"""Name -> settings of that side's own configuration, where the pairs differ."""
PAIRS = {"reflux": "TRL", "reflux, lean": "TRL, lean"}
LEAN = ("reflux, lean", "TRL, lean")
"""The pair that is there for its memory: timed once."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--peer", type=Path, default=ROOT / ".venv-bench/bin/python", help="Python with TRL")
    options.add_argument("--rounds", type=int, default=3, help="timed steps of each side in each workload")
    options.add_argument("--workloads", nargs="+", default=["fixed", "real"])
    options.add_argument("--sides", nargs="+", default=list(SIDES))
    options.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="reflux-bench-") as folder:
        student, teacher = saved_models(Path(folder))
        found = {}
        for name in given.workloads:
            shared = workload(name, student, teacher, given)
            found[name] = measured(shared, Path(folder), given)
            report(name, found[name])
    head_losses(given)
    if all(set(pair) <= set(given.sides) for pair in PAIRS.items()):
        print(json.dumps(ratios(found)))


def saved_models(folder: Path) -> tuple[Path, Path]:
    """The student without its quantisation flag, and the teacher."""
    path = sources.fetch(MODEL)
    model, generator = models.load_model(path), torch.Generator().manual_seed(0)
    student, teacher = folder / "student", folder / "teacher"
    model.save_pretrained(student)
    models.load_tokenizer(path).save_pretrained(student)
    for p in model.parameters():
        p += torch.randn(p.shape, generator=generator) * (NOISE * p.std(correction=0))
    model.save_pretrained(teacher)
    return student, teacher


def workload(name: str, student: Path, teacher: Path, given: argparse.Namespace) -> dict[str, Any]:
    tokenizer = models.load_tokenizer(student)
    asked = [str(record.values["prompt"]) for record in read_records(sources.fetch(PROMPTS))]
    if name == "fixed":
        texts = texts_of_length(tokenizer, " ".join(asked), PROMPT_TOKENS)
        prompts, eos_token = [tokenizer(text)["input_ids"] for text in texts], NEVER_DRAWN
    else:
        texts, eos_token = asked, tokenizer.eos_token
        prompts = [list(models.chat_token_ids(tokenizer, text)) for text in texts]
    needed = BATCH * (given.rounds + 3)
    return {
        "student": str(student), "teacher": str(teacher), "prompts": prompts[:needed], "texts": texts[:needed],
        "chat": name != "fixed", "eos_token": eos_token, "new_tokens": given.new_tokens, "batch": BATCH,
        "threads": given.threads, "beta": 0.5, "learning_rate": 1e-6,
    }  # fmt: skip


def texts_of_length(tokenizer: Any, text: str, tokens: int) -> list[str]:
    """Pieces of the text that are tokenized into exactly so many."""
    ids, texts, start = tokenizer(text)["input_ids"], list[str](), 0
    while start + tokens <= len(ids):
        piece = tokenizer.decode(ids[start : start + tokens])
        if len(tokenizer(piece)["input_ids"]) == tokens:
            texts.append(piece)
        start += tokens
    return texts


def measured(shared: dict[str, Any], folder: Path, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Side -> what it answered: its loss on one batch, the memory of a step, and timed steps. The two of a pair are
    there together and take turns; all four would need more memory than a small machine has.
    """
    batch = [{"prompt": prompt, "completion": prompt[::-1][:24]} for prompt in shared["prompts"][:4]]
    found: dict[str, dict[str, Any]] = {}
    for pair in PAIRS.items():
        names = [name for name in pair if name in given.sides]
        with ExitStack() as stack:
            ask = {name: stack.enter_context(side(name, shared, folder, given)) for name in names}
            for name in names:
                found[name] = {"loss": ask[name]("loss", sequences=batch), "steps": []}
                ask[name]("step")  # makes the optimizer's state, which is part of the floor
                found[name]["memory"] = ask[name]("memory")  # and is the last that is profiled
            for number in range(1 if pair == LEAN else given.rounds):
                for name in names if number % 2 == 0 else reversed(names):
                    found[name]["steps"].append(ask[name]("step"))
    return found


@contextmanager
def side(name: str, shared: dict[str, Any], folder: Path, given: argparse.Namespace) -> Iterator[Any]:
    """A function that asks the side's process and waits for its answer."""
    file = folder / f"{name}.json"
    Spec(**shared, settings=SIDES[name]).write(file)
    python, script = (sys.executable, "side_reflux.py") if name in PAIRS else (str(given.peer), "side_trl.py")
    log = (folder / f"{name}.log").open("w+")
    process = subprocess.Popen(
        [python, str(PARTS / script), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        env=environment(given),
    )  # fmt: skip
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None

    def ask(do: str, **more: Any) -> dict[str, Any]:
        if do != "begin":
            asked.write(json.dumps({"do": do, **more}) + "\n")
            asked.flush()
        for line in answered:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        log.seek(0)
        raise RuntimeError(f"{name} ended without an answer to {do}:\n{log.read()[-2000:]}")

    try:
        ready = ask("begin")
        if ready["torch"] != torch.__version__:
            raise ValueError(f"--peer {given.peer}: has torch {ready['torch']}, not {torch.__version__}")
        yield ask
    finally:
        asked.close()
        process.kill()
        process.wait()
        log.close()


def report(name: str, found: dict[str, dict[str, Any]]) -> None:
    print(f"\n{name}: completion tokens per second, medians (spread); MB\n")
    print("| side | rollouts | scored | whole step | a CPU second | above floor | rollouts | RSS | loss, nats |")
    print("|---|---|---|---|---|---|---|---|---|")
    for side_name, of_side in found.items():
        rates = [spread(values) for values in zip(*map(step_rates, of_side["steps"]), strict=True)]
        sizes = [f"{of_side['memory'][key]:.0f}" for key in ("above_floor_mb", "rollout_peak_mb")]
        sizes.append(f"{max(step['rss_bytes'] for step in of_side['steps']) / 1e6:.0f}")
        print(f"| {' | '.join([side_name, *rates, *sizes, format(of_side['loss']['loss_nats'], '.6f')])} |", flush=True)


def head_losses(given: argparse.Namespace) -> None:
    """The head and the loss alone, beside Liger's chunked loss at its own size of a chunk and at a smaller one."""
    print("\nhead and loss of 8 x 192 tokens, value and gradient\n")
    print("| | tokens per second | a CPU second | above floor, MB | nats | norm of the gradient |")
    print("|---|---|---|---|---|---|")
    for name, python, *options in (
        ("reflux", sys.executable),
        ("Liger, chunks of 1024", str(given.peer), "1024"),
        ("Liger, chunks of 64", str(given.peer), "64"),
    ):
        kind = "reflux" if name == "reflux" else "liger"
        command = [python, str(PARTS / "head_loss.py"), kind, str(given.threads), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(given))
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
        found = json.loads(line.removeprefix(MARK))
        speeds = f"{found['tokens_per_s']:.0f} | {found['tokens_per_cpu_s']:.0f} | {found['above_mb']:.0f}"
        print(f"| {name} | {speeds} | {found['nats']:.6f} | {found['gradient']:.6f} |", flush=True)


def environment(given: argparse.Namespace) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}


def step_rates(step: dict[str, Any]) -> tuple[float, ...]:
    """Completion tokens per second of the rollouts, of the scored part and of both, and per CPU second of both."""
    tokens, rollout_s, scored_s = step["completion_tokens"], step["rollout_s"], step["scored_s"]
    return tokens / rollout_s, tokens / scored_s, tokens / (rollout_s + scored_s), tokens / step["cpu_s"]


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def ratios(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The worse of the workloads and pairs."""
    speed, memory = [], []
    for workload_name, of_workload in found.items():
        rate = {name: statistics.median(step_rates(s)[2] for s in of["steps"]) for name, of in of_workload.items()}
        peak = {name: of["memory"]["above_floor_mb"] for name, of in of_workload.items()}
        for ours, theirs in PAIRS.items():
            speed.append(rate[ours] / rate[theirs])
            memory.append(peak[ours] / peak[theirs])
            print(f"{workload_name}, {ours} / {theirs}: tokens/s {speed[-1]:.2f}, memory {memory[-1]:.2f}")
    return {"ratio_tokens_per_s": round(min(speed), 3), "ratio_peak_memory": round(max(memory), 3)}


if __name__ == "__main__":
    main()
