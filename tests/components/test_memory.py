"""What is free here: to a machine, to a container with a limit, to each of several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflux.components.distill.config import DistillConfig
from reflux.components.distill.memory import Need, need, require_memory
from reflux.components.memory import available_gib
from reflux.components.models import ModelShape

GIB = 2**30


def machine(folder: Path, *, free: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {free * 2**20} kB\n")
    return file


def container(folder: Path, limit: str, *, current: int, cached: tuple[int, int]) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current * GIB}\n")
    active, inactive = (size * GIB for size in cached)
    (folder / "memory.stat").write_text(f"anon 1\nfile 9\nactive_file {active}\ninactive_file {inactive}\n")
    return folder


def test_files_that_a_container_has_cached_do_not_count_as_used(tmp_path: Path) -> None:
    file = machine(tmp_path, free=40)
    assert available_gib(file, tmp_path / "no limit") == 40
    assert available_gib(file, container(tmp_path, str(16 * GIB), current=12, cached=(2, 7))) == 13
    assert available_gib(file, container(tmp_path, "max", current=12, cached=(2, 7))) == 40
    assert available_gib(machine(tmp_path, free=3), container(tmp_path, str(16 * GIB), current=0, cached=(0, 0))) == 3
    assert available_gib(tmp_path / "another platform") is None


def test_what_is_kept_for_the_backward_pass_and_for_rollouts() -> None:
    shape = ModelShape(
        parameters=100_000, decoder=80_000, shared=20_000, linear=70_000, layers=2, hidden=64, intermediate=128,
        vocabulary=300, kv_channels=32,
    )  # fmt: skip

    def of(mode: str, tokens: int) -> Need:
        config = DistillConfig(
            rollout_batch=8, batch_sequences=4, micro_batch_sequences=4, max_sequence_tokens=tokens,
            rollout_new_tokens=16, activation_checkpointing=mode,
        )  # fmt: skip
        return need(config, shape, shape, "float32")

    modes = ("full", "selective", "none")
    short, long = ({mode: of(mode, tokens) for mode in modes} for tokens in (256, 1_000_256))
    assert (long["none"].rollouts - short["none"].rollouts) * GIB == pytest.approx(8 * 1_000_000 * 2 * 32 * 2 * 4)
    of_a_place = [(long[mode].forward - short[mode].forward) * GIB / 4e6 for mode in modes]
    whole = 54 * 64 + 22 * 128
    assert of_a_place == pytest.approx([2 * 4 * 64 + whole, 2 * (23 * 64 + 8 * 128) + whole, 2 * whole])
    kivi, int8 = (
        need(DistillConfig(kv_cache=form, batch_sequences=2), shape, shape, "bfloat16") for form in ("kivi4", "int8")
    )
    places, tokens = 2 * DistillConfig().max_sequence_tokens, DistillConfig().max_sequence_tokens
    assert (kivi.forward - int8.forward) * GIB == pytest.approx(2 * (4 * 64 - 2 * 32 + 2 * tokens) * places)
    rotated = need(DistillConfig(rotation="hadamard", activation="plain"), shape, shape, "float32")
    plain = need(DistillConfig(activation="plain"), shape, shape, "float32")
    assert (rotated.step - plain.step) * GIB == pytest.approx(4 * 20_000), "its head is untied"


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_gib()
    if free is None:
        pytest.skip("the platform does not say how much is free")
    needed = Need(forward=0.7 * free, step=0.0, rollouts=0.0)
    config = DistillConfig(device="cpu")
    assert "training needs about" in require_memory(needed, config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="are available here to each process; take smaller ones"):
        require_memory(needed, config)
