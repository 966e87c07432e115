"""Commands that read what a run left: report, label-tasks, lineage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from reflux.pipelines.cli.options import AS_JSON, DATA_DIR, ENDPOINT, OTHER_STORE


@click.command()
@click.argument("run")
@AS_JSON
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def report(run: str, as_json: bool, store: str, endpoint: str, data_dir: Path) -> None:
    """The table of RUN, a run's folder or name: every scheme beside the full-precision model."""
    from reflux.pipelines import runs
    from reflux.pipelines.review import report as reports
    from reflux.pipelines.store import stores

    result = reports.read(runs.find(run, data_dir), stores.given(store, endpoint, data_dir))
    click.echo(reports.machine_readable(result)) if as_json else reports.show(result)


@click.command(name="label-tasks")
@click.argument("run")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True,
    help="JSON file to write; the labelling configuration goes beside it, as .xml.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="A random sample of N answers; default: all.")
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def label_tasks(run: str, output: Path, limit: int | None, store: str, endpoint: str, data_dir: Path) -> None:
    """The answers of RUN as a project for Label Studio, whose JSON export is what --labels reads."""
    from reflux.pipelines import label_tasks as tasks
    from reflux.pipelines import runs
    from reflux.pipelines.store import stores

    number, config = tasks.write(runs.find(run, data_dir), output, stores.given(store, endpoint, data_dir), limit)
    click.echo(f"{number} tasks: {output}; labelling configuration: {config}")


@click.command()
@click.argument("run_or_bundle", metavar="RUN_OR_BUNDLE|models:/NAME@ALIAS|sha256:…")
@AS_JSON
@click.option("--expect", metavar="sha256:…", help="The digest that the root must have.")
@click.option(
    "--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Also write it as a page, to FILE."
)
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def lineage(
    run_or_bundle: str, as_json: bool, expect: str | None, html: Path | None, store: str, endpoint: str, data_dir: Path
) -> None:  # fmt: skip
    """Rebuild where a run or a bundle came from, from manifests alone, and verify every digest on the way.

    With --store the digest of an artifact, such as a run's root, is enough: nothing but the store is read.
    """
    from reflux.pipelines.review import lineage as lineages

    chain = lineages.verify(run_or_bundle, expect=expect, store=store, endpoint=endpoint, data_dir=data_dir)
    click.echo(json.dumps(chain.to_json(), indent=2)) if as_json else lineages.show(chain)
    if html is not None:
        from reflux.pipelines.review import lineage_page

        html.write_text(lineage_page.render(chain, of=run_or_bundle), encoding="utf-8")
        click.echo(f"page: {html}", err=True)
    if chain.mismatches:
        for mismatch in chain.mismatches:
            click.echo(f"does not match: {mismatch}", err=True)
        sys.exit(1)
