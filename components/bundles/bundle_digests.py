"""The digests of a bundle's files, so that one which was changed or cut short is an error and not another model.

quant_config.json holds them under "files". It is not among them: whoever deploys may set thresholds and the share at
which fallback.py falls back; the scheme in it has a digest of its own, and so has policy_table.bin.
"""

from __future__ import annotations

from pathlib import Path

from reflux.components.content_digest import file_sha256

DIGESTED = (
    "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """File -> sha256, of those that say what the model computes, and of what it is asked through."""
    return {name: file_sha256(folder / name) for name in DIGESTED if (folder / name).is_file()}


def require_intact(folder: Path, expected: dict[str, str]) -> None:
    """ValueError that names the first file which is not the one that was exported."""
    for name, digest in sorted(expected.items()):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}/{name}: is missing, the bundle was exported with it")
        if file_sha256(folder / name) != digest:
            raise ValueError(
                f"{folder}/{name}: its sha256 is not the one in quant_config.json, it was changed or cut short"
            )
