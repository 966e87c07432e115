"""Where a run or a bundle came from, rebuilt from manifests alone and verified: no database and no log is believed.

Starting at the root (a run's is evaluate's artifact, a bundle's is calibrate's, or the one with a given digest) every
parent's manifest is opened in the store, its digest compared with what the child recorded, and every object hashed
again. The files that were written out of the store (RUN/bundle/, RUN's pages) are compared with the manifests too.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from reflux.components.artifacts import Artifact, ArtifactError, verify_copy
from reflux.components.artifacts import verify as verify_objects
from reflux.components.storage import Store
from reflux.pipelines import runs
from reflux.pipelines.review import registered_models, written_out
from reflux.pipelines.store import stores

WIDTH = 200  # a tree is cut at the console's width, and a file or a narrow terminal should still get all of it
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
SHOWN_DIGEST = 19  # characters of "sha256:…" that the tree shows; --json has all of them


@dataclass(frozen=True, kw_only=True)
class Node:
    """One artifact of the chain, as its manifest describes it."""

    stage: str
    key: str
    digest: str
    version: str
    """Of the stage."""
    code: dict[str, str]
    """Versions of reflux, its commit and the libraries that computed."""
    platform: dict[str, str]
    started: str
    finished: str
    config: dict[str, Any]
    sources: dict[str, dict[str, str]]
    """field -> {"uri", "digest"}"""
    parents: dict[str, dict[str, str]]
    """input -> {"stage", "key", "digest"}"""
    shards: int
    rows: int
    bytes: int


@dataclass(kw_only=True)
class Chain:
    """Everything that the root was made from, each artifact once, root first; and what does not match."""

    root: str
    artifacts: dict[str, Node] = field(default_factory=dict)
    """digest -> artifact"""
    mismatches: list[str] = field(default_factory=list)
    """One line each, naming the object."""
    opened: dict[tuple[str, str], Artifact | None] = field(default_factory=dict)
    """stage and key -> the artifact, None where it cannot be read: each is verified once, whoever names it."""
    objects: set[tuple[str, str]] = field(default_factory=set)
    """What was hashed beside manifests, with the sha256 that it should have: one object can be in several artifacts."""

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "verified": not self.mismatches,
            "mismatches": self.mismatches,
            "artifacts": [asdict(node) for node in self.artifacts.values()],
        }


def verify(text: str, *, expect: str | None = None, store: str = "", endpoint: str = "", data_dir: Path) -> Chain:
    """The chain of a run (its folder or name), of a bundle (its folder or models:/NAME@ALIAS) or of the artifact with a
    digest in `store`.

    ValueError if it is none of them or unfinished. Whatever does not match is in `Chain.mismatches`. `store` replaces
    the recorded one.
    """
    wanted = (
        None if expect is None else _digest(expect, "--expect")
    )  # "" is a script's unset variable: it must not pass
    other, bundle = stores.given(store, endpoint, data_dir), Path(text)
    if text.startswith("sha256:"):
        if other is None:
            raise ValueError(f"{text}: a digest says what, not where; name its store with --store")
        with stores.opened(other) as (opened, _):
            chain = _verify_digest(_digest(text, "digest"), opened)
    elif text.startswith("models:/"):
        version = registered_models.version(text, data_dir)
        with stores.opened(other or registered_models.store_of(version, data_dir)) as (opened, _):
            chain = Chain(root=version.digest)
            _visit(chain, opened, _Named(version.stage, version.key, version.digest), version.name)
    elif (bundle / "manifest.json").is_file():
        with stores.opened(other or stores.read_beside(bundle)) as (opened, _):
            chain = _verify_bundle(bundle, opened)
    else:
        folder = runs.find(text, data_dir)
        record = runs.read_finished(folder, "root of its lineage")
        with stores.opened(other or record.store) as (opened, _):
            chain = _verify_run(folder, record, opened)
    if wanted is not None and wanted != chain.root:
        chain.mismatches.append(f"root: is {chain.root}, expected was {wanted}")
    return chain


def _digest(text: str, name: str) -> str:
    """A digest as people copy it, with or without `sha256:` before it. ValueError unless it is a whole one."""
    match = _SHA256.fullmatch(text.strip().lower())
    if not match:
        raise ValueError(f"{name} {text!r}: sha256: and 64 hexadecimal digits are expected, as `root:` is printed")
    return f"sha256:{match[1]}"


def show(chain: Chain) -> None:
    """The chain as a tree: what each artifact is, its sources, and under it what it was made from."""
    console = Console(width=WIDTH, soft_wrap=True, highlight=False)
    shown: set[str] = set()
    if chain.root in chain.artifacts:
        tree = Tree(_label("", chain.artifacts[chain.root]))
        _grow(tree, chain.artifacts[chain.root], chain, shown)
        console.print(tree)
    console.print(f"root: {chain.root}")
    objects = len(chain.objects) + len(chain.artifacts)
    if not chain.mismatches:
        console.print(
            f"verified: {len(chain.artifacts)} artifacts, {objects} objects, every digest matches", style="green"
        )
        console.print("not in any digest: the recipe's name, settings, where sources and store lie", style="dim")


def _verify_run(folder: Path, record: runs.RunRecord, store: Store) -> Chain:
    chain = Chain(root=record.root)
    _visit(chain, store, _Named("evaluate", record.artifacts["evaluate"]["key"], record.root), "run.json")
    found = {artifact.stage: artifact for artifact in chain.opened.values() if artifact is not None}
    chain.mismatches += written_out.compare_record(folder / runs.RECORD, record, found, store)
    if "calibrate" in found:  # else what is missing is named already
        chain.mismatches += written_out.compare_bundle(folder / "bundle", store, found["calibrate"].key)
    for stage, page in written_out.PAGES.items():
        if stage in found:
            chain.mismatches += written_out.compare_page(folder / page, found[stage])
    return chain


def _verify_digest(digest: str, store: Store) -> Chain:
    """From the store alone: its manifests are read until one has the digest, for no name leads from it to a key."""
    for name in store.list("objects"):
        if not name.endswith("/manifest.json"):
            continue
        _, stage, key, _ = name.split("/")
        with suppress(ArtifactError):  # a damaged one that is not of this chain is not this chain's concern
            if Artifact.open(store, stage, key).digest == digest:
                chain = Chain(root=digest)
                _visit(chain, store, _Named(stage, key, digest), "the command")
                return chain
    raise ValueError(f"{digest}: no artifact in the store {store.uri} has it")


def _verify_bundle(bundle: Path, store: Store) -> Chain:
    try:
        manifest = Artifact(store, (bundle / "manifest.json").read_bytes(), "bundle/manifest.json")
    except ArtifactError:
        return Chain(root="unknown", mismatches=verify_copy(bundle))
    chain = Chain(root=manifest.digest)
    _visit(chain, store, _Named(manifest.stage, manifest.key, manifest.digest), str(bundle / "manifest.json"))
    chain.mismatches += written_out.compare_bundle(bundle, store, manifest.key)
    return chain


class _Named(NamedTuple):
    """An artifact as another one names it."""

    stage: str
    key: str
    digest: str


def _visit(chain: Chain, store: Store, named: _Named, child: str) -> None:
    """Verify one artifact and, depth first, all it was made from. `child` is who recorded that it has this digest."""
    address = named.stage, named.key
    known = address in chain.opened
    if not known:
        chain.mismatches += verify_objects(store, *address, chain.objects)
        chain.opened[address] = _open(store, *address)
    artifact = chain.opened[address]
    if artifact is None or named.digest in chain.artifacts:  # what it was made from is only known to itself
        return
    if artifact.digest != named.digest:
        chain.mismatches.append(f"{artifact.place}: is {artifact.digest}, {child} recorded {named.digest}")
    chain.artifacts[named.digest] = _node(artifact)
    if not known:
        for parent in artifact.record.parents.values():
            _visit(chain, store, _Named(parent.stage, parent.key, parent.digest), artifact.place)


def _open(store: Store, stage: str, key: str) -> Artifact | None:
    try:
        return Artifact.open(store, stage, key)
    except ArtifactError:  # among the problems of its verification
        return None


def _node(artifact: Artifact) -> Node:
    record = artifact.record
    return Node(
        stage=record.stage,
        key=record.key,
        digest=record.digest,
        version=record.version,
        code=dict(record.versions),
        platform=dict(record.platform),
        started=record.started,
        finished=record.finished,
        config=artifact.config,
        sources={name: asdict(source) for name, source in record.sources.items()},
        parents={name: asdict(parent) for name, parent in record.parents.items()},
        shards=len(record.shards),
        rows=sum(shard.rows or 0 for shard in record.shards),
        bytes=sum(shard.bytes for shard in record.shards),
    )


def _grow(tree: Tree, node: Node, chain: Chain, shown: set[str]) -> None:
    shown.add(node.digest)
    for name, source in sorted(node.sources.items()):
        tree.add(f"[dim]source[/] {escape(name)}: {escape(source['uri'])}  [dim]{source['digest'][:SHOWN_DIGEST]}…[/]")
    for name, parent in sorted(node.parents.items()):
        digest = parent["digest"]
        if digest not in chain.artifacts:
            tree.add(f"[red]{escape(name)}: {parent['stage']} {digest[:SHOWN_DIGEST]}… not found[/]")
        elif digest in shown:
            tree.add(f"[dim]{escape(name)}: {parent['stage']} {digest[:SHOWN_DIGEST]}… (shown already)[/]")
        else:
            _grow(tree.add(_label(f"{name}: ", chain.artifacts[digest])), chain.artifacts[digest], chain, shown)


def _label(prefix: str, node: Node) -> str:
    commit = node.code.get("commit", "")
    code = f"reflux {node.code.get('reflux', '?')}{f' at {commit[:10]}' if commit else ''}"
    size = f"{node.rows:,} rows, {megabytes(node.bytes)}"
    return (
        f"{escape(prefix)}[bold]{node.stage}[/] [cyan]{node.digest[:SHOWN_DIGEST]}…[/]  {size}  [dim]{escape(code)}[/]"
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
