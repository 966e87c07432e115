"""Commands for specifications: compile one, and lint any."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reflux.pipelines.cli.recipe import CONFIG, IMAGE, RECIPE, SETTINGS, configured

REQUIRE_DIGESTS = click.option(
    "--require-digests", is_flag=True, help="Refuse an image that is named by a tag, which can move."
)


STORE = click.option(
    "--store", metavar="s3://…", default="", help="What the form's field has in it; the default is nothing."
)
PIPELINE = click.option(
    "--pipeline", metavar="NAME", default="", help="Under which it is registered; the default is reflux-RECIPE."
)


@click.command(name="compile")
@RECIPE
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; the default is the terminal.",
)
@IMAGE
@STORE
@REQUIRE_DIGESTS
@click.option(
    "--as", "form", type=click.Choice(["specification", "objects"]), default="specification", show_default=True,
    help="Objects are KFP's Pipeline and PipelineVersion, for `kubectl apply`.",
)  # fmt: skip
@PIPELINE
@click.option("--namespace", metavar="NAME", default="", help="Of the objects; the default is kubectl's.")
@SETTINGS
@CONFIG
def compile_(
    recipe: str, output: Path | None, image: str | None, store: str, require_digests: bool, form: str, pipeline: str,
    namespace: str, settings: tuple[str, ...], config: Path | None,
) -> None:  # fmt: skip
    """The KFP specification of a recipe, for `kfp` or the Pipelines UI. What no cluster can run is refused."""
    full = configured(recipe, config, {}, settings)
    if form == "specification" and (pipeline or namespace):
        raise ValueError("--pipeline and --namespace name objects: they need --as objects")

    from reflux.pipelines.kubeflow import native_objects, package, registration

    compiled = package.of_recipe(recipe, full, image=image or "", store=store, require_digests=require_digests)
    text = compiled.text
    if form == "objects":
        name = registration.pipeline_name(recipe, pipeline)
        text = native_objects.to_yaml(compiled, pipeline=name, namespace=namespace)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"--output {output}: there is no folder {output.parent}; make it first") from None
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written ({error.strerror})") from None


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@REQUIRE_DIGESTS
def lint(file: Path, require_digests: bool) -> None:
    """What a Kubeflow cluster cannot run of FILE, a KFP specification or a PipelineVersion, whoever made it.

    Exit codes: 0 nothing is found, 1 something is, 2 it is no specification.
    """
    from reflux.pipelines import ir_lint

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from None
    findings = ir_lint.lint(text, require_digests=require_digests)
    for finding in findings:
        click.echo(finding)
    if findings:
        sys.exit(1)
