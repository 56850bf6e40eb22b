"""The dashboard and the alerts of deploy/, asked of a real Prometheus that scrapes a real run."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import creel
from creel.counters import COUNTERS
from daemons import Running
from kit import listening, until
from testbed.http_server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(360)]

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text())
RULES = ROOT / "deploy/prometheus.yaml"
#: Only the daemons of several nodes have these series.
OF_CLUSTERS = 'tier="peers"'


def panels() -> dict[str, list[str]]:
    """Return the queries of each panel."""
    return {p["title"]: [target["expr"] for target in p["targets"]] for p in DASHBOARD["panels"]}


def rules() -> dict[str, str]:
    """Return what each rule asks, by its name; there is no YAML where the tests run."""
    parts = re.split(r"\n +- (?:record|alert): (\S+).*\n", RULES.read_text())[1:]
    asked = [
        re.search(r"expr: (?:>-\n)?((?:.|\n)*?)(?:\n +(?:for|labels):|\Z)", x) for x in parts[1::2]
    ]
    return {name: " ".join(m[1].split()) for name, m in zip(parts[::2], asked, strict=True) if m}


def test_they_ask_for_metrics_that_there_are_and_each_alert_has_an_answer() -> None:
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    families = {c.metric + suffix for c in COUNTERS for suffix in suffixes[c.kind]}
    queries = [query for queries in panels().values() for query in queries]
    asked = {
        name for query in (*queries, *rules().values()) for name in re.findall(r"creel_\w+", query)
    }
    assert asked <= families
    page = (ROOT / "docs/monitoring.md").read_text()
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    assert len(alerts) == 6
    assert re.findall(r"^### (Creel\w+)$", page, re.MULTILINE) == alerts
    assert [f"#{name.lower()}" in RULES.read_text() for name in alerts].count(False) == 0


def test_panels_lie_beside_each_other() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


class Prometheus:
    """A Prometheus of this test alone, which scrapes one page every two seconds.

    It gives up a scrape that takes longer, as it may on busy cores.
    """

    def __init__(self, folder: Path, page: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(
            f"""global: {{scrape_interval: 2s, evaluation_interval: 500ms}}
rule_files: [{json.dumps(str(RULES))}]
scrape_configs:
  - {{job_name: creel, honor_labels: true, static_configs: [{{targets: ["{page}"]}}]}}
"""
        )
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        address = "--web.listen-address=127.0.0.1:0"
        command = ["prometheus", *options, address]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stderr=self._log, stdout=self._log)
        self._port = 0

    def __enter__(self) -> Prometheus:
        self._port = listening(self._process.pid)[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def get(self, path: str, **arguments: str) -> Any:
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(arguments)}"
        with urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]

    def answers(self, query: str) -> bool:
        """Whether a query, as Grafana would ask it, has a number now.

        In a short interval nothing may happen on a busy machine, and a query may ask for the
        interval before it, so that it answers late.
        """

        def numbers(interval: str) -> list[float]:
            asked = query.replace("$__rate_interval", interval).replace("$job", ".*")
            series = self.get("query", query=asked)["result"]
            return [float(sample["value"][1]) for sample in series]

        return any(not math.isnan(x) for every in ("10s", "30s", "90s") for x in numbers(every))


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus' server"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Prometheus' promtool"
)


def first_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[:64]), dtype=torch.uint8)


@pytest.fixture
def loaders(tmp_path: Path) -> Iterator[list[creel.DataLoader[Any]]]:
    """Loaders of a run that reads, evicts, keeps decoded samples and asks a web server."""
    (tmp_path / "files").mkdir()
    paths = [tmp_path / "files" / str(i) for i in range(64)]
    for path in paths:
        path.write_bytes(bytes(256 << 10))
    with Server(tmp_path / "files") as server:
        far = [f"{server.url}/{path.name}" for path in paths]
        plain = creel.FileDataset(paths, decode=first_bytes)
        kept = creel.FileDataset(paths, decode=first_bytes, keep_decoded="8MiB")
        options: dict[str, Any] = {"shuffle": True, "creel": {"loader.direct": "never"}}
        yield [
            creel.DataLoader(plain, 16, num_workers=1, persistent_workers=True, **options),
            creel.DataLoader(kept, 16, **options),
            creel.DataLoader(creel.FileDataset(far), 16, **options),
        ]


@needs_prometheus
def test_each_panel_and_rule_answers_from_a_real_run(
    daemon_name: str,
    tmp_path: Path,
    loaders: list[creel.DataLoader[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    # Both tiers together hold fewer than the 32 MiB of files: each epoch reads some again, not only
    # the first, which may be over before the first scrape.
    disk = {"CREEL_DISK__PATH": str(tmp_path), "CREEL_DISK__BUDGET": "8MiB"}
    with Running(daemon_name, "--metrics", "127.0.0.1:0", memory="16MiB", env=disk) as daemon:
        ports = listening(daemon.pid)
        open_questions = {query for queries in panels().values() for query in queries}
        open_questions = {query for query in open_questions if OF_CLUSTERS not in query}
        with Prometheus(tmp_path, f"127.0.0.1:{ports[0]}") as prometheus:

            def all_answered() -> bool:
                for loader in loaders:
                    assert isinstance(loader, TorchDataLoader)
                    assert len(list(loader)) == 4
                answered = {query for query in open_questions if prometheus.answers(query)}
                open_questions.difference_update(answered)
                return not open_questions

            until(all_answered, 240, event=open_questions)

            def rules_answer() -> bool:
                """A rule counts from its second evaluation on: before, no rate was known."""
                groups = prometheus.get("rules")["groups"]
                health = {
                    rule["name"]: rule["health"] for group in groups for rule in group["rules"]
                }
                recorded = [name for name in rules() if name.startswith("creel:")]
                answers = all(map(prometheus.answers, recorded))
                return answers and health == dict.fromkeys(rules(), "ok")

            until(rules_answer, 60, event="the rules answer")


@needs_promtool
def test_a_step_is_predicted_from_the_interval_before(tmp_path: Path) -> None:
    """Ranks step each second; the workers of one need 1.5 s for a batch, from minute 20 on 4."""
    series = {
        'creel_batches_total{job="a",rank="0"}': "0+60x40",
        'creel_batches_total{job="a",rank="1"}': "0+60x40",
        'creel_workers{job="a",rank="0"}': "2x40",
        'creel_workers{job="a",rank="1"}': "2x40",
        'creel_worker_busy_seconds_total{job="a",rank="0",stage="decode"}': "0+30x40",
        'creel_worker_busy_seconds_total{job="a",rank="1",stage="decode"}': "0+180x20 3600+480x20",
        'creel_stall_seconds_total{job="a",rank="0",cause="decode"}': "0+0x40",
        'creel_stall_seconds_total{job="a",rank="1",cause="decode"}': "0+30x40",
    }
    measured, predicted = (
        query.replace("$__rate_interval", "5m").replace("$job", ".*")
        for query in panels()["A step, predicted and measured"]
    )
    expected = ((measured, "20m", 1.0), (predicted, "20m", 1.5), (predicted, "40m", 4.0))
    asked = [
        {"expr": query, "eval_time": at, "exp_samples": [{"labels": '{job="a"}', "value": value}]}
        for query, at, value in expected
    ]
    lines = [{"series": name, "values": values} for name, values in series.items()]
    promtool(tmp_path, [{"interval": "1m", "input_series": lines, "promql_expr_test": asked}])


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    series = {
        "CreelTrainingWaits": 'creel_stall_seconds_total{job="a",rank="0",cause="source"}',
        "CreelObjectsFail": 'creel_failed_objects_total{job="a",rank="0"}',
        "CreelStoreThrottles": 'creel_throttles_total{source="s"}',
        "CreelMemoryReturned": 'creel_cache_evictions_total{instance="n",reason="returned"}',
        "CreelBug": 'creel_errors_total{instance="n",kind="bug"}',
        "CreelBatchOverdue": 'creel_overdue_seconds{job="a",rank="0"}',
    }
    steps = {"CreelTrainingWaits": 20, "CreelStoreThrottles": 120}  # a minute
    tests = []
    for alert, name in series.items():
        for grows, fires in ((steps.get(alert, 90), 1), (0, 0)):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": f"0+{grows}x40"}],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                            "eval_time": "30m",
                            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                        }
                    ],
                }
            )
    promtool(tmp_path, tests)


def promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Let promtool check the rules, and run tests of them and of queries."""
    cases = folder / "cases.yaml"  # JSON is YAML
    cases.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", str(cases))):
        done = subprocess.run(
            ["promtool", *arguments], capture_output=True, text=True, timeout=110, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
