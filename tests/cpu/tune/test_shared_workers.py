"""Workers in processes of their own over one storage: none evaluates what another does, none is missed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from flashgen.search.history import outcomes_of
from flashgen.search.log import Log
from flashgen.tune.shared import Ledger, Pace, StorageError
from flashgen.tune.shared.evaluator import SharedEvaluator
from flashgen.tune.shared.storage import parsed_url
from tests import postgres as servers
from tests import searches
from tests.fakes import digest_of
from tests.ledger_workers import Crew, Moment, alone
from tests.postgres import Postgres

TIMED: Moment = ("timed", searches.BEST)
ALSO_TIMED: Moment = ("timed", searches.DEFAULT)
FINAL: Moment = ("final", searches.BEST)

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture(scope="module")
def postgres(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    if servers.programs() is None:
        why = "there is no PostgreSQL: apt-get install postgresql"
        if request.config.getoption("--need-postgres"):
            pytest.fail(why)
        pytest.skip(why)
    with servers.running() as server:
        yield server


def assert_shared_out(crew: Crew, *deaths: Moment) -> None:
    """Every config was evaluated once; and once more what a worker died of."""
    expected = Counter(dict.fromkeys(crew.evaluations, 1))
    for stage, config in deaths:
        expected[stage, config.label] += 1
    assert crew.evaluations == expected


def assert_nothing_is_left(url: str, *, dead: int) -> None:
    """All claims have ended; of four workers as many as died were found dead, the others left."""
    storage = optuna.storages.RDBStorage(url) if url.startswith("postgres") else journal(url)
    names = optuna.get_all_study_names(storage)
    studies = {name: optuna.load_study(study_name=name, storage=storage) for name in names}
    workers = [trial.state for trial in studies["flashgen: workers"].trials]
    assert Counter(workers) == {TrialState.FAIL: dead, TrialState.PRUNED: 4 - dead}
    trials = [trial for study in studies.values() for trial in study.trials]
    assert all(trial.state.is_finished() for trial in trials)
    assert sum("died" in trial.user_attrs for trial in trials) >= dead


def journal(url: str) -> optuna.storages.BaseStorage:
    backend = optuna.storages.journal.JournalFileBackend(url.removeprefix("journal://"))
    return optuna.storages.JournalStorage(backend)


@pytest.mark.parametrize("kind", ["journal", "postgres"])
def test_four_workers_of_which_two_die_end_as_one(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    if kind == "postgres":
        url, deaths = request.getfixturevalue("postgres").create("crew"), (TIMED, ALSO_TIMED)
    else:
        url, deaths = f"journal://{tmp_path}/run.journal", (TIMED, FINAL)
    crew = Crew(url, tmp_path / "crew", 4, deadly=deaths)
    found = crew.run()
    assert len(found) == 2
    assert_shared_out(crew, *deaths)
    assert len(crew.busy) == 4
    assert list(found.values()) == [alone(tmp_path / "alone")] * 2
    assert_nothing_is_left(url, dead=2)


def test_the_test_above_sees_that_claims_are_ignored(tmp_path: Path) -> None:
    crew = Crew(f"journal://{tmp_path}/run.journal", tmp_path / "crew", 2, lawless=True)
    crew.run()
    with pytest.raises(AssertionError):
        assert_shared_out(crew)


def opened(url: str, *, patience_s: float = 0.3, **fields: Any) -> Ledger:
    pace = Pace(beat_s=1, grace_s=60, patience_s=patience_s, look_s=0.0)
    return Ledger(url, gpu=searches.GPU.slug, request={}, pace=pace, **fields)


def assert_one_sentence(error: BaseException, url: str) -> None:
    """With the storage's name, and no password, escaped or not."""
    assert "\n" not in str(error)
    assert url.rpartition("@")[2] in str(error)
    for secret in (servers.PASSWORD, servers.PASSWORD.replace(" ", "%20"), "s3cret"):
        assert secret not in str(error)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"password": "s3cret"}, r"password authentication failed.*PGPASSWORD or ~/.pgpass"),
        ({"database": "none"}, r'database "none" does not exist.*createdb none'),
    ],
    ids=["a wrong password", "no such database"],
)
def test_what_the_server_refuses(postgres: Postgres, changes: dict[str, str], said: str) -> None:
    url = postgres.url(**({"database": "postgres"} | changes))
    with pytest.raises(StorageError, match=said) as caught:
        opened(url)
    assert_one_sentence(caught.value, url)


def test_a_user_who_may_make_no_tables(postgres: Postgres) -> None:
    url = postgres.create("guarded")
    with postgres.connect("guarded") as connection:
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 's3cret'")
    url = postgres.url("guarded", user="guest", password="s3cret")
    with pytest.raises(StorageError, match=r"permission denied.*database of its own") as caught:
        opened(url)
    assert_one_sentence(caught.value, url)


def test_tables_of_another_optuna(postgres: Postgres) -> None:
    url = postgres.create("foreign")
    opened(url).close()
    with postgres.connect("foreign") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
    with pytest.raises(StorageError, match=r"tables of another Optuna") as caught:
        opened(url)
    assert_one_sentence(caught.value, url)


def test_a_password_of_the_environment_is_used(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", servers.PASSWORD)
    url = postgres.create("quiet").replace(":correct%20horse", "")
    with opened(url.replace("+psycopg", "")) as ledger:
        assert ledger.shown == url


def test_a_server_that_is_started_again_costs_nothing(postgres: Postgres, tmp_path: Path) -> None:
    notices: list[str] = []
    inner = searches.fake()
    with opened(postgres.create("again"), patience_s=60.0, notice=notices.append) as ledger:
        evaluator = SharedEvaluator(inner, ledger, digest_of=digest_of)
        asked = evaluator.evaluate("timed", searches.SPEC, searches.PROBLEM, searches.SPACE[:6])
        first = next(asked)
        postgres.stop()
        with ThreadPoolExecutor() as threads:
            rest_to_come = threads.submit(list, asked)
            while not notices and not rest_to_come.done():
                time.sleep(0.01)
            assert notices, rest_to_come.result()
            postgres.start()
            rest = rest_to_come.result()
    assert [first, *rest] == list(
        searches.fake().evaluate("timed", searches.SPEC, searches.PROBLEM, searches.SPACE[:6])
    )
    assert len(inner.asked) == 6
    assert "does not answer" in notices[0]


def test_a_server_that_stays_away_is_one_sentence(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.create("away")
    with opened(url, notice=lambda _: None) as ledger:
        log = Log(tmp_path / "log.jsonl", gpu="nvidia_h200", triton="3.7.1", shared=ledger.id)
        evaluator = SharedEvaluator(searches.fake(), ledger, memory=log, digest_of=digest_of)
        asked = evaluator.evaluate("timed", searches.SPEC, searches.PROBLEM, searches.SPACE[:6])
        next(asked)
        postgres.stop()
        try:
            with log, pytest.raises(StorageError, match="same command resumes") as caught:
                next(asked)
        finally:
            ledger.close()  # at once, though nobody answers
            postgres.start()
    assert_one_sentence(caught.value, url)
    kept = outcomes_of(tmp_path / "log.jsonl", lambda _: None)
    assert [outcome.config for outcome in kept] == list(searches.SPACE[:2])


@pytest.mark.parametrize("kind", ["journal", "postgres"])
def test_the_dashboard_opens_on_a_run(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    if kind == "journal":
        url = f"{tmp_path}/run.journal"
    else:
        url = request.getfixturevalue("postgres").create("shown")
    with opened(url) as ledger:
        evaluator = SharedEvaluator(searches.fake(), ledger, digest_of=digest_of)
        list(evaluator.evaluate("timed", searches.SPEC, searches.PROBLEM, searches.SPACE[:3]))
        list(evaluator.evaluate("final", searches.SPEC, searches.PROBLEM, searches.SPACE[:3]))
    port = servers.free_port()
    program = shutil.which("optuna-dashboard", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [program, url, "--port", str(port), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as dashboard:
        try:
            studies = answer_of(dashboard, f"http://127.0.0.1:{port}/api/studies")[
                "study_summaries"
            ]
            names = {study["study_name"]: study["study_id"] for study in studies}
            (search,) = set(names) - {"flashgen: run", "flashgen: workers"}  # one study a search
            assert searches.SPEC.name in search
            detail = answer_of(dashboard, f"http://127.0.0.1:{port}/api/studies/{names[search]}")
            *trials, final = detail["trials"]
            assert detail["objective_names"] == ["time, us"]
        finally:
            dashboard.terminate()
    stages = [
        attribute["value"]
        for trial in (*trials, final)
        for attribute in trial["user_attrs"]
        if attribute["key"] == "stage"
    ]
    assert stages == ["timed"] * 3 + ["final"]
    assert [trial["state"] for trial in trials] == ["Complete"] * 3
    assert [trial["values"] for trial in trials] == [
        [searches.landscape(config)] for config in searches.SPACE[:3]
    ]
    assert {param["name"]: param["param_external_value"] for param in trials[0]["params"]} == {
        name: str(value) for name, value in vars(searches.SPACE[0]).items()
    }


def answer_of(program: subprocess.Popen[bytes], url: str) -> Any:
    """The JSON that a program serves, once it does."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_manifests_of_the_documentation_fit_together() -> None:
    page = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    service, database, job = yaml.safe_load_all(text)
    assert [each["kind"] for each in (service, database, job)] == ["Service", "StatefulSet", "Job"]
    (server,) = database["spec"]["template"]["spec"]["containers"]
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert service["spec"]["selector"] == database["spec"]["template"]["metadata"]["labels"]
    words = [*worker["command"], *worker["args"]]
    url = parsed_url(words[words.index("--storage") + 1])
    known = {each["name"]: each.get("value") for each in server["env"]}
    assert (url.host, url.username, url.database) == (
        service["metadata"]["name"],
        known["POSTGRES_USER"],
        known["POSTGRES_DB"],
    )
    passwords = [
        each["valueFrom"] for each in (*server["env"], *worker["env"]) if "valueFrom" in each
    ]
    assert passwords[0] == passwords[1]
    assert (
        passwords[0]["secretKeyRef"]["name"] in page.split("create secret generic ")[1].split()[0]
    )
