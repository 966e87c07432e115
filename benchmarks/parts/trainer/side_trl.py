"""TRL's DistillationTrainer as one side of the comparison; runs in the environment that has TRL.

Steps are those of `train()`: a callback waits for the parent's command before each and answers after it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from side import Allocations, Spec, Stopwatch, answer, commands, read_spec, train_decoder_layers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Timed(DistillationTrainer):
    """The trainer as it is, its generation timed."""

    watch: Stopwatch

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        make = super()._generate_single_turn
        return self.watch.rollouts(lambda: make(*args, **kwargs), lambda ids: [len(row) for row in ids])

    def loss_of(self, sequences: list[dict[str, list[int]]]) -> float:
        """Nats per completion token, by `compute_loss` on a batch made as generation makes it."""
        prompts, completions = ([torch.tensor(s[name]) for s in sequences] for name in ("prompt", "completion"))
        prompt_BT, completion_BT = _padded(prompts, "left"), _padded(completions, "right")
        inputs = {
            "prompt_ids": prompt_BT[0], "prompt_mask": prompt_BT[1],
            "completion_ids": completion_BT[0], "completion_mask": completion_BT[1],
            "num_items_in_batch": completion_BT[1].sum(),
        }  # fmt: skip
        self.model.train()
        with torch.no_grad():
            return float(self.compute_loss(self.model, inputs))


class Turns(TrainerCallback):
    """One step for each command."""

    trainer: Timed

    def __init__(self, allocations: Allocations) -> None:
        self.waiting, self.allocations, self.do = commands(), allocations, ""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for command in self.waiting:
            if command["do"] == "loss":
                answer({"loss_nats": self.trainer.loss_of(command["sequences"])})
                continue
            self.do = command["do"]
            if self.do == "memory":
                self.allocations.begin()
            self.trainer.watch.start()
            return
        raise SystemExit(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = self.trainer.watch.stop()
        answer(self.allocations.end(self.trainer.model) if self.do == "memory" else asdict(step))


def trainer_of(spec: Spec, output: Path, allocations: Allocations) -> Timed:
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (spec.student, spec.teacher)
    )
    train_decoder_layers(student)
    teacher.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(spec.student, padding_side="left", eos_token=spec.eos_token)
    prompts = [[{"role": "user", "content": text}] if spec.chat else text for text in spec.texts]
    options = {
        "output_dir": str(output), "max_steps": 10_000,
        "learning_rate": spec.learning_rate, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "weight_decay": 0.0, "max_grad_norm": 1.0, "beta": spec.beta,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_length": spec.new_tokens,
        "shuffle_dataset": False, "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "logging_strategy": "no", "save_strategy": "no", "dataloader_num_workers": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    config = DistillationConfig(**options | spec.settings)
    trainer = Timed(
        model=student, teacher_model=teacher, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer, callbacks=[turns := Turns(allocations)],
    )  # fmt: skip
    trainer.watch, turns.trainer = Stopwatch(), trainer
    return trainer


def _padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids_BT = pad(rows, batch_first=True, padding_side=side)
    return ids_BT, pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)


if __name__ == "__main__":
    given = read_spec()
    torch.set_num_threads(given.threads)
    trainer_of(given, Path(given.student).parent / "trl", Allocations()).train()
