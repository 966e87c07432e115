"""Where a run or a bundle came from, rebuilt from manifests alone and verified: no database and no log is believed.

Starting at the root (a run's is evaluate's artifact, a bundle's is calibrate's) every parent's manifest is opened in
the store, its digest compared with what the child recorded, and every object hashed again. The files that were written
out of the store (RUN/bundle/, RUN/report.html) are compared with the manifests too.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from reflux.components.artifacts import Artifact, ArtifactError, manifest_key, verify_copy
from reflux.components.artifacts import verify as verify_objects
from reflux.components.storage import Store
from reflux.pipelines import report, runs, stores

WIDTH = 200  # a tree is cut at the console's width, and a file or a narrow terminal should still get all of it
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

    def to_json(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "verified": not self.mismatches,
            "mismatches": self.mismatches,
            "artifacts": [asdict(node) for node in self.artifacts.values()],
        }


def verify(text: str, *, expect: str = "", store: str = "", endpoint: str = "", data_dir: Path) -> Chain:
    """The chain of a run (its folder or name) or of a bundle (its folder). ValueError if it is neither or unfinished.

    Whatever does not match is in `Chain.mismatches`. `store` replaces the recorded one.
    """
    bundle = Path(text)
    if (bundle / "manifest.json").is_file():
        ref = _store(store, endpoint, data_dir) or stores.read_beside(bundle)
        with stores.opened(ref) as (opened, _):
            chain = _verify_bundle(bundle, opened)
    else:
        folder = runs.find(text, data_dir)
        record = runs.read_finished(folder, "root of its lineage")
        with stores.opened(_store(store, endpoint, data_dir) or record.store) as (opened, _):
            chain = _verify_run(folder, record, opened)
    if expect and expect != chain.root:
        chain.mismatches.append(f"root: is {chain.root}, expected was {expect}")
    return chain


def show(chain: Chain) -> None:
    """The chain as a tree: what each artifact is, its sources, and under it what it was made from."""
    console = Console(width=WIDTH, soft_wrap=True, highlight=False)
    shown: set[str] = set()
    if chain.root in chain.artifacts:
        tree = Tree(_label("", chain.artifacts[chain.root]))
        _grow(tree, chain.artifacts[chain.root], chain, shown)
        console.print(tree)
    console.print(f"root: {chain.root}")
    objects = sum(node.shards + 1 for node in chain.artifacts.values())
    if not chain.mismatches:
        console.print(
            f"verified: {len(chain.artifacts)} artifacts, {objects} objects, every digest matches", style="green"
        )


def _store(store: str, endpoint: str, data_dir: Path) -> stores.StoreRef | None:
    return stores.choose(store, endpoint, data_dir)[0] if store else None


def _verify_run(folder: Path, record: runs.RunRecord, store: Store) -> Chain:
    chain = Chain(root=record.root)
    _visit(chain, store, "evaluate", record.artifacts["evaluate"]["key"], record.root, "run.json")
    found = {node.stage: node.digest for node in chain.artifacts.values()}
    for stage, recorded in record.artifacts.items():
        if stage in found and found[stage] != recorded["digest"]:
            chain.mismatches.append(
                f"{folder / runs.RECORD}: {stage} is {found[stage]}, recorded is {recorded['digest']}"
            )
    keys = {node.stage: node.key for node in chain.artifacts.values()}
    for stage, key in keys.items():
        if record.artifacts[stage]["key"] != key:
            chain.mismatches.append(f"{folder / runs.RECORD}: the key of {stage} is {key}, recorded is another")
    if "calibrate" in keys:  # else what is missing is named already
        _compare_bundle(chain, folder / "bundle", store, keys["calibrate"])
    _compare_verdict(chain, folder, record, store)
    _compare_report(chain, folder / "report.html", store, record.artifacts["evaluate"]["key"])
    return chain


def _verify_bundle(bundle: Path, store: Store) -> Chain:
    try:
        manifest = Artifact(store, (bundle / "manifest.json").read_bytes(), "bundle/manifest.json")
    except ArtifactError:
        return Chain(root="unknown", mismatches=verify_copy(bundle))
    chain = Chain(root=manifest.digest)
    _visit(chain, store, manifest.stage, manifest.key, manifest.digest, f"{bundle / 'manifest.json'}")
    _compare_bundle(chain, bundle, store, manifest.key)
    return chain


def _visit(chain: Chain, store: Store, stage: str, key: str, digest: str, child: str) -> None:
    """Verify one artifact and, depth first, all it was made from. `child` is who recorded that it has this digest."""
    if digest in chain.artifacts:
        return
    problems = verify_objects(store, stage, key)
    chain.mismatches += problems
    try:
        artifact = Artifact.open(store, stage, key)
    except ArtifactError:  # among the problems already; what it was made from is only known to it
        return
    if artifact.digest != digest:
        chain.mismatches.append(f"{artifact.uri}: is {artifact.digest}, {child} recorded {digest}")
    chain.artifacts[digest] = _node(artifact)
    for parent in artifact.record.parents.values():
        _visit(chain, store, parent.stage, parent.key, parent.digest, artifact.uri)


def _compare_bundle(chain: Chain, bundle: Path, store: Store, key: str) -> None:
    """A bundle's files against its manifest, and its manifest against the store's."""
    problems = verify_copy(bundle)
    chain.mismatches += problems
    manifest = bundle / "manifest.json"
    name = manifest_key("calibrate", key)
    if manifest.is_file() and not problems and (not store.exists(name) or store.read(name) != manifest.read_bytes()):
        chain.mismatches.append(f"{manifest}: is not the manifest in the store, {store.uri}/{name}")


def _compare_verdict(chain: Chain, folder: Path, record: runs.RunRecord, store: Store) -> None:
    try:
        verdict = report.from_artifact(store, record.run, record.artifacts["evaluate"]["key"])["verdict"]
    except ArtifactError:  # named already
        return
    if record.verdict != verdict:
        chain.mismatches.append(f"{folder / runs.RECORD}: the verdict is {verdict}, recorded is {record.verdict!r}")


def _compare_report(chain: Chain, page: Path, store: Store, key: str) -> None:
    try:
        (shard,) = Artifact.open(store, "evaluate", key).shards("report.html")
    except ArtifactError:  # named already
        return
    if not page.is_file():
        chain.mismatches.append(f"{page}: missing")
    elif hashlib.sha256(page.read_bytes()).hexdigest() != shard.sha256:
        chain.mismatches.append(f"{page}: was changed: its manifest says sha256 {shard.sha256}")


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
