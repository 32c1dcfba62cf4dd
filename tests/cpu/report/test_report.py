"""The HTML report: whole, self-contained, escaped, and true to the table and the log."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.report.history import Searches, SearchHistory
from flashgen.report.html import page, write_report
from flashgen.report.importance import importances
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Status
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import Entry, figure
from flashgen.table.table import Table
from tests.fakes import FakeEvaluator
from tests.makers import make_config, make_spec
from tests.tables import AHEAD, FA2, H200, SPEC, made_entry, made_run, made_table, with_evidence

VOID = {"meta", "input", "br", "wbr", "circle", "line", "path"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Every element inside with this tag, and with these words among these attributes."""
        return [
            found
            for found in self.walk()
            if found.tag == tag
            and all(v in (found.attributes.get(k) or "").split() for k, v in attributes.items())
        ]

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())


class Tree(HTMLParser):
    """Builds Elements, and fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], [element.tag for element in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag
        if tag not in ("b", "code", "a", "span"):
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.pieces.append(data)


def parsed(table: Table, outcomes: list[Outcome] | None = None) -> Element:
    return Tree(page(table, outcomes or [])).root


def cells(row: Element) -> list[str]:
    return [cell.text for cell in row.children if cell.tag in ("td", "th")]


# ---------------------------------------------------------------- made-up searches


def us_of(config: KernelConfig) -> float:
    """A landscape with its best at br 128, bc 64, of which the tile decides most."""
    return 300.0 + abs(config.br - 128) + abs(config.bc - 64) / 2 + (config.num_stages != 3) * 5


def outcomes_of(
    entry: Entry, configs: list[KernelConfig], source: Source = "measured", **fields: Any
) -> list[Outcome]:
    evaluator = FakeEvaluator(
        us=us_of, gpu=H200, source=source, guess=lambda config: us_of(config) * 0.8, **fields
    )
    return list(evaluator.evaluate("timed", entry.spec, entry.problem, configs))


def searched(
    source: Source = "measured", spec: AttentionSpec = SPEC, **fields: Any
) -> tuple[Table, list[Outcome]]:
    """A table of one entry, and the log of the search that chose it."""
    configs = [c for c in legal_configs(spec, H200) if c.schedule == "fa2" and c.num_warps == 8][
        :40
    ]
    best = min(configs, key=us_of)
    entry = made_entry(spec, config=best, source=source, median_us=us_of(best))
    entry = with_evidence(entry, sdpa_us=390.0 if source == "measured" else None)
    outcomes = outcomes_of(entry, configs, source, **fields)
    run = replace(made_run("a", source), triton="3.7.1", protocol=outcomes[0].protocol)
    return Table(gpu=H200).with_entry(entry, run), outcomes


def with_log(entry: Entry) -> tuple[Table, list[Outcome]]:
    """A table of this entry, and a log of its search with one config."""
    outcomes = outcomes_of(entry, [entry.config], entry.result.source)
    run = replace(made_run("a", entry.result.source), triton="3.7.1", protocol=outcomes[0].protocol)
    return Table(gpu=H200).with_entry(entry, run), outcomes


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_nothing_is_asked_of_the_network(source: Source) -> None:
    text = page(*searched(source))
    assert re.findall(r"https?:|//[a-z]|@import|url\((?!#)|fetch\(|<link|<iframe|<img", text) == []
    sources = [
        e.attributes.get(name)
        for e in Tree(text).root.walk()
        for name in ("src", "href", "data", "action")
    ]
    assert [s for s in sources if s is not None and not s.startswith("#")] == []


def test_every_link_has_a_place_and_every_place_one_name() -> None:
    table, outcomes = searched()
    table = table.with_entry(made_entry(bucket=BUCKETS[2], run="b"), made_run("b"))
    root = parsed(table, outcomes)
    names = [e.attributes["id"] for e in root.walk() if "id" in e.attributes]
    assert len(names) == len(set(names))
    links = [(e.attributes["href"] or "").removeprefix("#") for e in root.all("a")]
    assert len(links) >= 8
    assert set(links) <= set(names)
    labels = [
        e.attributes[key]
        for e in root.walk()
        for key in ("for", "aria-labelledby")
        if key in e.attributes
    ]
    assert set(labels) <= set(names)


def test_the_winners_are_those_of_the_table() -> None:
    table = made_table(
        made_entry(),
        made_entry(bucket=BUCKETS[2], source="untimed"),
        made_entry(make_spec(), source="measured", config=FA2, median_us=3.14159),
    )
    section = parsed(table).one("section", id="winners")
    rows = [row for body in section.all("tbody") for row in body.all("tr")]
    order = sorted(table.entries, key=lambda entry: entry.result.source != "measured")
    for entry, row in zip(order, rows, strict=True):
        spec, config, source, us, tflops, over_default, tried = cells(row)
        result = entry.result
        assert spec == f"{entry.spec.name} seq_k {entry.bucket}, at {entry.problem.seq_k}"
        assert (config, source, tried) == (entry.config.label, result.source, "60/98")
        if result.median_us is None:
            assert (us, tflops, over_default) == ("-", "-", "-")
        else:
            assert (us, tflops, over_default) == (
                figure(result.median_us),
                f"{entry.tflops:.0f}",
                "2.00",
            )


def test_speed_ups_over_the_default_and_sdpa_are_summed_up() -> None:
    one, two = made_entry(source="measured"), made_entry(bucket=BUCKETS[2], source="measured")
    one = with_evidence(one, sdpa_us=812.3 * 1.5)
    two = replace(two, result=replace(two.result, speedup=8.0))
    root = parsed(made_table(one, two))
    first, second = (item.text for item in root.one("main").all("ul")[0].all("li"))
    assert (
        first
        == "Over the default kernel: 4.00 times as fast in the geometric mean of 2 entries, from 2.00 to 8.00."
    )
    assert (
        second
        == "Over torch's SDPA: 1.50 times as fast in the geometric mean of 1 entries, from 1.50 to 1.50."
    )
    table = root.one("section", id="winners").one("table")
    assert cells(table.one("thead").one("tr"))[-2] == "x SDPA"
    assert [cells(row)[-2] for row in table.one("tbody").all("tr")] == ["1.50", "-"]


@pytest.mark.parametrize(
    ("found", "warned"),
    [(["estimated"], True), (["untimed"], True), (["measured", "estimated"], False)],
)
def test_what_was_not_measured_is_said(found: list[Source], warned: bool) -> None:
    entries = [made_entry(bucket=BUCKETS[n], source=source) for n, source in enumerate(found)]
    root = parsed(made_table(*entries))
    notes = [note.text for note in root.all("p", **{"class": "note"})]
    assert len(notes) == warned
    assert all("Nothing in this table was measured." in note for note in notes)
    for source in found:
        assert f"1 {source}" in [
            badge.text for badge in root.one("header").all("span", **{"class": "badge"})
        ]


def test_an_entry_shows_its_evidence() -> None:
    entry = made_entry(source="measured")
    entry = with_evidence(entry, p_value=0.0123, regret=0.015, sdpa_us=999.5)
    text = parsed(*with_log(entry)).one("details", id="e1").text
    for part in (
        f"fwd_bf16_d128_causal_{AHEAD.label}",
        "batch 8, heads 16/16, seq 2048 x 2048",
        "812.3 us (406.15 to 1624.6, 20th to 80th percentile)",
        "default 1624.6 us, SDPA 999.5 us",
        "p of the final round 0.012",
        "regret, to have fewer kernels 1.5 %",
        "174 registers per thread, 98304 bytes",
    ):
        assert part in text
    plain = parsed(*with_log(made_entry())).one("details", id="e1").text
    assert "p of the final round" not in plain
    assert "SDPA not timed" in plain
    assert "the interval of the estimate" in plain


def test_odd_text_stays_text() -> None:
    odd = "<script>alert('1')</script>\"&"
    table = made_table(made_entry())
    run = replace(table.runs[0], torch=odd, clocks="<b>", driver='"><img src=x>')
    root = parsed(replace(table, gpu=replace(H200, name=odd), runs=(run,)))
    assert root.one("h1").text == f"Tuning report: {odd}"
    assert len(root.all("script")) == 1
    assert {odd, "<b>"} <= set(cells(root.all("tbody")[-1].one("tr")))
    assert root.all("img") == []


def test_an_empty_table_has_a_page() -> None:
    assert "0 entries: none." in parsed(Table(gpu=H200)).one("header").text


# ---------------------------------------------------------------- charts of a search


def test_the_history_is_that_of_the_log() -> None:
    table, outcomes = searched()
    outcomes[3] = replace(outcomes[3], stage="rough", status=Status.DROPPED)
    details = parsed(table, outcomes).one("details", id="e1")
    chart = details.one("svg", role="img")
    titles = [title.text for title in chart.all("title")]
    assert sorted(titles) == sorted(
        f"{n}: {o.config.label}, {figure(us_of(o.config))} us" for n, o in enumerate(outcomes, 1)
    )
    assert titles[0].startswith("4: ")  # dropped
    assert table.entries[0].config.label in titles[-1]  # the winner, on top
    anchors = {text.text: text.attributes["style"] for text in chart.all("text")}
    for name in (
        "default",
        "SDPA",
    ):  # early configs and the first steps of the best lie at the left
        assert "text-anchor: end" in anchors[name]
    rows = details.one("details", **{"class": "data"}).one("tbody").all("tr")
    best = 1e9
    for n, (row, outcome) in enumerate(zip(rows, outcomes, strict=True), 1):
        number, label, us, so_far, estimate = cells(row)
        time = us_of(outcome.config)
        best = min(best, time)
        assert (number, us, so_far, estimate) == (
            str(n),
            figure(time),
            figure(best),
            figure(0.8 * time),
        )
        marks = [*["winner"] * (outcome.config == table.entries[0].config), *["dropped"] * (n == 4)]
        assert label == " ".join([outcome.config.label, *marks])


def test_the_heat_map_has_the_best_of_each_tile() -> None:
    table, outcomes = searched("estimated")
    details = parsed(table, outcomes).one("details", id="e1")
    heat = details.one("table", **{"class": "heat"})
    columns = [int(th.text.removeprefix("bc ")) for th in heat.one("thead").all("th")]
    shown = {}
    for row in heat.one("tbody").all("tr"):
        br = int(row.one("th").text.removeprefix("br "))
        for bc, cell in zip(columns, row.all("td"), strict=True):
            shown[br, bc] = cell
    tiles = trace(outcomes, table).tiles_us
    assert {tile: us for tile, us in tiles.items() if us == min(tiles.values())} == {
        (128, 64): 300.0
    }
    for tile, cell in shown.items():
        of_tile = [us_of(o.config) for o in outcomes if (o.config.br, o.config.bc) == tile]
        assert cell.text == (figure(min(of_tile)) if of_tile else "-")
        assert (cell.attributes.get("class") == "top") == (tile == (128, 64))
        if of_tile:  # the stronger the colour, the faster
            assert cell.attributes["style"] == f"--t:{0.6 * (300.0 / min(of_tile)) ** 2:.2f}"
    assert set(tiles) <= set(shown)
    data = details.one("details", **{"class": "data"}).one("thead").one("tr")
    assert cells(data) == ["#", "config", "estimated us", "best so far"]


@pytest.mark.parametrize(
    ("package", "note_of_it"),
    [
        ("optuna", "no importances: importances need optuna: "),
        ("matplotlib.figure", "no charts: charts need matplotlib: "),
    ],
)
def test_without_a_package_the_rest_is_there(
    package: str, note_of_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    notes: list[str] = []
    text = page(*searched(), notice=notes.append)
    assert "History" in text
    (note,) = notes
    assert note_of_it in note


def test_failures_are_counted() -> None:
    def failing(_: str, config: KernelConfig) -> Status | None:
        return Status.SPILLS if config.num_stages == 2 else None

    table, outcomes = searched(failing=failing)
    spilled = sum(o.status is Status.SPILLS for o in outcomes)
    assert spilled
    figures = parsed(table, outcomes).one("details", id="e1").all("figure")
    assert f"Of this spec failed: {spilled} spills." in figures[0].text
    assert f"of {len(outcomes) - spilled} configs" in figures[0].text


# ---------------------------------------------------------------- estimates against measurements


def test_estimates_stand_against_measurements() -> None:
    table, outcomes = searched()
    root = parsed(table, outcomes)
    section = root.one("section", **{"aria-labelledby": "estimates"})
    titles = [title.text for title in section.one("svg", role="img").all("title")]
    assert len(titles) == len(outcomes)
    first = outcomes[0].config
    assert (
        f"estimated {figure(0.8 * us_of(first))} us, measured {figure(us_of(first))} us"
        in titles[0]
    )
    rows = [cells(row) for row in section.one("tbody").all("tr")]
    assert rows[0][:4] == ["all", str(len(outcomes)), "1.00", "0.0%"]
    assert [row[0] for row in rows[1:]] == ["fa2 descriptor", "fa2 pointer"]


def test_without_a_measurement_there_is_nothing_to_compare() -> None:
    table, outcomes = searched("estimated")
    section = parsed(table, outcomes).one("section", **{"aria-labelledby": "estimates"})
    assert "No config in this log has both" in section.text
    assert section.all("svg") == []


# ---------------------------------------------------------------- the file


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    table, outcomes = searched()
    write_report(table, outcomes, tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text() == page(table, outcomes)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"must be an \.html file: got .*report\.pdf"):
        write_report(made_table(), [], tmp_path / "report.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(FlashgenError, match="cannot be written"):
        write_report(made_table(), [], tmp_path / "file" / "report.html")


# ---------------------------------------------------------------- traces, importances, axes


def trace(outcomes: list[Outcome], table: Table) -> SearchHistory:
    return Searches(outcomes).of(table.entries[0], table.runs[0])


def test_a_trace_is_of_its_own_search_alone() -> None:
    table, outcomes = searched()
    good = outcomes[0]
    assert len(trace([good], table).points) == 1
    problem = replace(good.problem, kv_heads=1)
    strangers = [
        replace(good, problem=problem),
        replace(good, spec=make_spec(head_dim=32)),
        replace(good, source="estimated"),
        replace(good, protocol=99),
        replace(good, triton="3.6.0"),
        replace(good, stage="final"),
        replace(good, stage="check"),
    ]
    for stranger in strangers:
        assert trace([stranger], table).points == ()
    of_another_gpu = [replace(outcome, gpu="nvidia_l4") for outcome in outcomes]
    assert "The log holds no time of any search." in page(table, of_another_gpu)
    assert TARGETS["nvidia_l4"].slug == "nvidia_l4"


def test_the_field_that_decides_is_the_most_important() -> None:
    configs = [
        make_config(br, bc, num_warps=warps, num_stages=stages)
        for br in (16, 32, 64, 128) for bc in (16, 32, 64, 128) for warps in (4, 8) for stages in (1, 2, 3)
    ]  # fmt: skip
    times = {
        c: 100.0 + 50 * (c.bc != 64) + 0.1 * c.num_stages + 0.001 * n for n, c in enumerate(configs)
    }
    shares = importances(times)
    assert next(iter(shares)) == "bc"
    assert set(shares) == {"br", "bc", "num_warps", "num_stages"}
    assert sum(shares.values()) == pytest.approx(1.0)
