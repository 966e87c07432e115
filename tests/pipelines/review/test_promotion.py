"""Who becomes champion, who does not, and what two that ask at once get."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from registered_bundles import MODEL, register

from reflux.components import registry
from reflux.components.storage import Store
from reflux.pipelines.__main__ import cli
from reflux.pipelines.review import promotion_ledger
from reflux.pipelines.review.promotion_ledger import Record


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{shutil.copy(empty_mlflow, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    yield client
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def promote(root: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["promote", MODEL, "--data-dir", str(root / "data"), *more])


def aliases(client: Any) -> dict[str, int]:
    return registry.aliases(client, MODEL)


def test_the_first_the_better_and_the_worse(tmp_path: Path, client: Any, store: Store) -> None:
    register(store, perplexity=40.0)
    first = promote(tmp_path)
    assert (first.exit_code, first.output) == (0, "models:/student/1 is the champion: first (perplexity 40)\n")
    register(store, perplexity=35.0)
    better = promote(tmp_path)
    assert "models:/student/2 is the champion: better (perplexity 35, the one before 40)" in better.output
    assert aliases(client) == {"candidate": 2, "champion": 2, "previous": 1}
    assert client.get_model_version(MODEL, "2").tags["reflux.promotion"] == "2: better"

    register(store, perplexity=36.0)
    worse = promote(tmp_path)
    assert worse.exit_code == 3
    assert "models:/student/3 stays what it is: its perplexity is 36, the champion's 35" in worse.output
    equal = promote(tmp_path, "--metric", "pmr")
    assert "its pmr is 0.9, the champion's 0.9" in equal.output
    assert aliases(client) == {"candidate": 3, "champion": 2, "previous": 1}

    assert promote(tmp_path, "--force").exit_code == 2
    forced = promote(tmp_path, "--force", "--reason", "shorter answers")
    assert forced.exit_code == 0, forced.output
    last = promotion_ledger.read(store, MODEL)[-1]
    assert (last.why, last.reason, last.value, last.previous_value) == ("forced", "shorter answers", 36.0, 35.0)
    assert client.get_model_version(MODEL, "3").tags["reflux.promotion"] == "3: forced, shorter answers"


def test_once_more_changes_nothing_and_puts_aliases_right(tmp_path: Path, client: Any, store: Store) -> None:
    for perplexity in (40.0, 35.0):
        register(store, perplexity=perplexity)
        assert promote(tmp_path).exit_code == 0
    records = promotion_ledger.read(store, MODEL)
    client.set_registered_model_alias(MODEL, "champion", "1")  # by hand, or by a command that was killed
    client.delete_registered_model_alias(MODEL, "previous")
    again = promote(tmp_path)
    assert (again.exit_code, again.output) == (0, "models:/student/2 is the champion already\n")
    assert promotion_ledger.read(store, MODEL) == records
    assert aliases(client) == {"candidate": 2, "champion": 2, "previous": 1}


def test_back_to_the_previous_champion_and_not_forward_again_by_itself(
    tmp_path: Path, client: Any, store: Store
) -> None:
    register(store, perplexity=40.0)
    assert promote(tmp_path).exit_code == 0
    assert promote(tmp_path, "--rollback").exit_code == 2
    register(store, perplexity=35.0)
    assert promote(tmp_path).exit_code == 0
    back = promote(tmp_path, "--rollback", "--reason", "it repeats itself")
    assert back.output == "models:/student/1 is the champion: rollback\n"
    assert aliases(client) == {"candidate": 2, "champion": 1, "previous": 2}
    again = promote(tmp_path)
    assert again.exit_code == 3
    assert "it was rolled back at" in again.output
    assert "it repeats itself" in again.output
    register(store, perplexity=34.0)
    assert promote(tmp_path).exit_code == 0
    assert aliases(client) == {"candidate": 3, "champion": 3, "previous": 1}

    assert "models:/student/1 is the champion: rollback" in promote(tmp_path, "--rollback").output
    further = promote(tmp_path, "--rollback")
    assert further.exit_code == 2, "2 and 3 were rolled back, so a second rollback leads to neither"
    assert "there is no previous champion to roll back to" in further.output


def test_numbers_measured_on_something_else_are_not_compared(tmp_path: Path, client: Any, store: Store) -> None:
    register(store, perplexity=40.0)
    assert promote(tmp_path).exit_code == 0
    register(store, perplexity=20.0, text={"name": "other", "sha256": "ef", "windows": 8, "window_tokens": 512})
    result = promote(tmp_path)
    assert result.exit_code == 3
    assert "was not measured on what the champion's was" in result.output


@pytest.mark.parametrize(
    ("champion", "message"),
    [
        ("foreign", "it cannot be compared with the champion (models:/student/2: was not registered by reflux)"),
        ("deleted", "it cannot be compared with the champion (models:/student/1: MLflow's registry has no such"),
        ("elsewhere", "it cannot be compared with the champion ("),
    ],
)
def test_a_champion_that_cannot_be_judged_gives_way_to_force_alone(
    tmp_path: Path, client: Any, store: Store, champion: str, message: str
) -> None:
    register(store, perplexity=40.0)
    assert promote(tmp_path).exit_code == 0
    if champion == "foreign":  # by hand, as the alias of a model without a history
        store.delete_prefix("promotions")
        client.create_model_version(MODEL, source="s3://elsewhere/model")
        client.set_registered_model_alias(MODEL, "champion", "2")
    elif champion == "deleted":
        client.delete_model_version(MODEL, "1")
    else:
        store.delete_prefix("objects/evaluate")
    better = register(store, perplexity=35.0).number
    refused = promote(tmp_path)
    assert refused.exit_code == 3, refused.output
    assert message in refused.output
    forced = promote(tmp_path, "--force", "--reason", "the champion is of another team")
    assert forced.exit_code == 0, forced.output
    record = promotion_ledger.read(store, MODEL)[-1]
    assert (record.champion, record.why, record.value, record.previous_value) == (better, "forced", 35.0, None)
    assert aliases(client)["champion"] == better
    if champion == "deleted":
        back = promote(tmp_path, "--rollback")
        assert back.exit_code == 2
        assert "models:/student/1: is the previous champion, and was deleted" in back.output
        assert promotion_ledger.read(store, MODEL)[-1] == record


def test_back_past_a_champion_that_somebody_made_by_hand(tmp_path: Path, client: Any, store: Store) -> None:
    for perplexity in (40.0, 35.0):
        register(store, perplexity=perplexity)
        assert promote(tmp_path).exit_code == 0
    client.create_model_version(MODEL, source="s3://elsewhere/model")
    client.set_registered_model_alias(MODEL, "champion", "3")
    unknown = promote(tmp_path, "--rollback")
    assert unknown.exit_code == 2
    assert "models:/student/3: was not registered by reflux; if the model has a history of promotions" in unknown.output
    back = promote(tmp_path, "--rollback", "--store", str(tmp_path / "store"))
    assert back.output == "models:/student/1 is the champion: rollback\n"
    assert aliases(client)["champion"] == 1


def test_mlflow_that_goes_away_is_one_line(
    tmp_path: Path, client: Any, store: Store, empty_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database loses its tables once the version was found."""
    database = Path(shutil.copy(empty_mlflow, tmp_path / "mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    register(store, perplexity=40.0)
    read = promotion_ledger.read

    def then_away(at: Store, model: str) -> list[Record]:
        database.write_bytes(b"")
        return read(at, model)

    monkeypatch.setattr(promotion_ledger, "read", then_away)
    done = promote(tmp_path)
    assert done.exit_code == 2
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error: MLFLOW_TRACKING_URI sqlite:")]
    assert "MLflow cannot be used ((sqlite3.OperationalError) no such table" in line


def test_the_gate_is_read_from_the_store_and_not_from_a_tag(tmp_path: Path, client: Any, store: Store) -> None:
    version = register(store, perplexity=40.0, verdict="fail")
    assert client.get_model_version(MODEL, "1").tags["reflux.verdict"] == "pass"
    result = promote(tmp_path)
    assert result.exit_code == 3
    assert "its gate says fail" in result.output
    client.set_model_version_tag(MODEL, "1", "reflux.root", version.digest)
    result = promote(tmp_path)
    assert result.exit_code == 2
    assert "is not the one that its tags name" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "9"], "models:/student/9: MLflow's registry has no such version"),
        (["--metric", "loss"], "--metric 'loss': allowed are perplexity,"),
        (["--rollback", "--version", "1"], "without --version and --force"),
    ],
)
def test_wrong_input(tmp_path: Path, client: Any, store: Store, arguments: list[str], message: str) -> None:
    register(store, perplexity=40.0)
    result = promote(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_without_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = promote(tmp_path)
    assert result.exit_code == 2
    assert "set MLFLOW_TRACKING_URI" in result.output


def test_whoever_loses_the_race_is_judged_against_the_new_champion(
    tmp_path: Path, client: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command becomes quicker between the reading of the ledger and the writing of the next record."""
    for perplexity in (40.0, 33.0, 35.0):
        register(store, perplexity=perplexity)
    assert promote(tmp_path, "--version", "1").exit_code == 0
    read = promotion_ledger.read

    def then_the_other(at: Store, model: str) -> list[Record]:
        records = read(at, model)
        monkeypatch.setattr(promotion_ledger, "read", read)
        assert promote(tmp_path, "--version", "2").exit_code == 0
        return records

    monkeypatch.setattr(promotion_ledger, "read", then_the_other)
    result = promote(tmp_path, "--version", "3")
    assert result.exit_code == 3
    assert "its perplexity is 35, the champion's 33" in result.output
    assert [record.champion for record in read(store, MODEL)] == [1, 2]


@pytest.mark.slow  # each process takes seconds to import MLflow
def test_two_processes_at_once(tmp_path: Path, client: Any, store: Store) -> None:
    """Whoever is first: one record after the other, the best is the champion, and the aliases say so."""
    for perplexity in (40.0, 35.0, 33.0):
        register(store, perplexity=perplexity)
    assert promote(tmp_path, "--version", "1").exit_code == 0
    command = [sys.executable, "-m", "reflux.pipelines", "promote", MODEL, "--data-dir", str(tmp_path / "data")]
    both = [
        subprocess.Popen([*command, "--version", version], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for version in ("2", "3")
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    records = promotion_ledger.read(store, MODEL)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert [record.previous for record in records[1:]] == [record.champion for record in records[:-1]]
    assert records[-1].champion == 3
    assert aliases(client)["champion"] == 3
    assert aliases(client)["previous"] == records[-1].previous
    assert "models:/student/3 is the champion: better" in said[1]
    assert ("stays what it is" in said[0]) == (len(records) == 2)
