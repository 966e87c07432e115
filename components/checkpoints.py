"""Checkpoints of a stage at work: a set of files is there whole or not at all, and the last two sets are kept.

`<folder>/<step>/checkpoint.json` is written last and lists the sha256 of each file. A checkpoint that does not verify
is passed over for the one before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from reflux.components.canonical import canonical
from reflux.components.provenance import checked_name
from reflux.components.storage import Store

KEPT = 2
_MARKER = "checkpoint.json"


class Checkpoints:
    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder

    def save(self, step: int, files: Mapping[str, Path]) -> None:
        if step < 0 or not files:
            raise ValueError(
                f"checkpoint of step {step} with files {sorted(files)}: a step >= 0 and at least one file are needed"
            )
        place = self._place(step)
        self.store.delete(f"{place}/{_MARKER}")  # a torn checkpoint of that step must not count while it is rewritten
        hashes = {name: self.store.upload(f"{place}/files/{checked_name(name)}", path) for name, path in files.items()}
        self.store.write(f"{place}/{_MARKER}", canonical({"step": step, "sha256": hashes}))
        for old in self._complete()[:-KEPT]:
            self.store.delete_prefix(self._place(old))

    def latest(self, into: Path) -> int | None:
        """Fetch the newest checkpoint that verifies; its step, or None."""
        for step in reversed(self._complete()):
            if self._fetch(step, into):
                return step
        return None

    def clear(self) -> None:
        self.store.delete_prefix(self.folder)

    def _fetch(self, step: int, into: Path) -> bool:
        partial = into / ".checkpoint"  # verified as a whole before any file takes its place
        try:
            record = json.loads(self.store.read(f"{self._place(step)}/{_MARKER}"))
            for name, sha256 in record["sha256"].items():
                if self.store.download(f"{self._place(step)}/files/{checked_name(name)}", partial / name) != sha256:
                    return False
            for name in record["sha256"]:
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
