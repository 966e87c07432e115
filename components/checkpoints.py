"""Checkpoints of a stage at work: a set of files is there whole or not at all, and the last two sets are kept.

`<folder>/<step>/checkpoint.json` is written last and lists the sha256 of each file. A checkpoint that does not verify
is passed over for the one before it. Several processes make one checkpoint together: each brings its own files, the
first writes the list once all are there, and all go on from the same step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from reflux.components import processes
from reflux.components.canonical import canonical
from reflux.components.provenance import checked_name
from reflux.components.storage import Store

KEPT = 2
_MARKER = "checkpoint.json"


class Checkpoints:
    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder

    def save(self, step: int, files: Mapping[str, Path]) -> None:
        """Keep `files`, and those of every other process, under names of their own; ValueError if there are none."""
        if step < 0 or (not files and processes.is_first()):
            raise ValueError(
                f"checkpoint of step {step} with files {sorted(files)}: a step >= 0 and at least one file are needed"
            )
        place = self._place(step)
        if processes.is_first():  # a torn checkpoint of that step must not count while it is rewritten
            self.store.delete(f"{place}/{_MARKER}")
        processes.told(None)
        own = {name: self.store.upload(f"{place}/files/{checked_name(name)}", path) for name, path in files.items()}
        hashes = {name: sha256 for each in processes.gathered(own) for name, sha256 in each.items()}
        if processes.is_first():
            self.store.write(f"{place}/{_MARKER}", canonical({"step": step, "sha256": hashes}))
            for old in self._complete()[:-KEPT]:
                self.store.delete_prefix(self._place(old))

    def latest(self, into: Path, wanted: Callable[[str], bool] = lambda name: True) -> int | None:
        """Fetch the `wanted` files of the newest checkpoint that verifies at every process; its step, or None."""
        for step in reversed(processes.told(self._complete())):
            if all(processes.gathered(self._fetch(step, into, wanted))):
                return step
        return None

    def clear(self) -> None:
        self.store.delete_prefix(self.folder)

    def _fetch(self, step: int, into: Path, wanted: Callable[[str], bool]) -> bool:
        partial = into / ".checkpoint"  # verified as a whole before any file takes its place
        try:
            record = json.loads(self.store.read(f"{self._place(step)}/{_MARKER}"))
            expected = {name: sha256 for name, sha256 in record["sha256"].items() if wanted(name)}
            for name, sha256 in expected.items():
                if self.store.download(f"{self._place(step)}/files/{checked_name(name)}", partial / name) != sha256:
                    return False
            for name in expected:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).replace(into / name)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # torn: the one before it counts
            return False
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return True

    def _complete(self) -> list[int]:
        """Steps whose marker exists, in rising order."""
        keys = (key.removeprefix(f"{self.folder}/").split("/") for key in self.store.sizes(self.folder))
        return sorted(int(parts[0]) for parts in keys if len(parts) == 2 and parts[0].isdigit() and parts[1] == _MARKER)

    def _place(self, step: int) -> str:
        return f"{self.folder}/{step:08d}"
