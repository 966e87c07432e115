"""reflux evaluate: the table for somebody else's bundle or checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reflux.pipelines.cli.options import AS_JSON


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--base", required=True, metavar="MODEL", help="The model in full precision that it was made from: path, hub id, …"
)
@click.option(
    "--prompts", default="builtin:demo_prompts.jsonl", show_default=True, metavar="FILE", help="What both are asked."
)
@click.option("--eval-text", default="", metavar="FILE", help="UTF-8 text for perplexity; default: Python's reference.")
@click.option("--windows", type=int, default=8, show_default=True, help="Windows of the text.")
@click.option("--window-tokens", type=int, default=512, show_default=True, help="Tokens of a window.")
@click.option("--answers", type=int, default=20, show_default=True, help="Prompts asked; 0 is all.")
@click.option("--latency-tokens", type=int, default=100, show_default=True, help="Decoded tokens that are timed.")
@AS_JSON
def evaluate(
    model: Path, base: str, prompts: str, eval_text: str, windows: int, window_tokens: int, answers: int,
    latency_tokens: int, as_json: bool,
) -> None:  # fmt: skip
    """The table of a run for MODEL, a bundle or a folder in Hugging Face layout, beside what it was made from."""
    from reflux.components.evaluate.config import EvaluateConfig
    from reflux.pipelines import evaluation
    from reflux.pipelines.review import report

    config = EvaluateConfig(
        teacher=base,
        student_uri=base,
        eval_text_uri=eval_text,
        windows=windows,
        window_tokens=window_tokens,
        heldout_traces=answers,
        latency_tokens=latency_tokens,
        generations=0,
    )
    result = evaluation.evaluate(model, config, prompts)
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    report.show_table(result["table"])
    for row in result["not_run"]:
        click.echo(f"not run: {row['scheme']}: {row['reason']}")
