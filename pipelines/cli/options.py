"""Options that several commands share, so that one name means one thing wherever it is given."""

from __future__ import annotations

from pathlib import Path

import click

DATA_DIR = click.option(
    "--data-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("reflux-data"), show_default=True,
    help="Where runs, the embedded store and MLflow's database live.",
)  # fmt: skip
STORE = click.option(
    "--store", metavar="embedded|DIR|s3://…", default="embedded", show_default=True, help="Where artifacts are kept."
)
OTHER_STORE = click.option(
    "--store", metavar="embedded|DIR|s3://…", default="", help="Instead of the store that the run or bundle records."
)
ENDPOINT = click.option("--endpoint", metavar="URL", default="", help="Of an S3 server other than AWS.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")
