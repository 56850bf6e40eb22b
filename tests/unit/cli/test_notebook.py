"""What a notebook's cell shows of a loader and of the daemon."""

from __future__ import annotations

import html.parser
from collections.abc import Iterator

import pytest
from cli_rig import SESSION, STATS, FakeClient, answering

import creel
from creel.cli.watching import view
from creel.errors import NoDaemonError


class Cells(html.parser.HTMLParser):
    """The texts of all cells of the tables in some HTML, and whether each tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open[-1] in {"th", "td", "caption"}
        self.texts.append(data)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    yield from answering(monkeypatch)


def test_the_daemons_counters_are_a_dict_and_a_table(daemon: FakeClient) -> None:
    stats = creel.stats()
    assert stats == STATS
    cells = Cells(stats._repr_html_()).texts
    assert {*view.SESSION_HEADER, *view.session_row(SESSION)} <= set(cells)
    assert "900 of 1,000 (90.0 %)" in cells
    lines = repr(stats).splitlines()
    assert lines[-2].split()[:2] == ["job", "rank"]
    assert lines[-1].split()[:2] == ["resnet", "3"]
    assert daemon.closed


def test_without_open_streams_it_shows_ranks(daemon: FakeClient) -> None:
    stats = creel.stats()
    stats["sessions"] = []
    assert set(view.rank_row(SESSION)) <= set(Cells(stats._repr_html_()).texts)
    assert repr(stats).splitlines()[-1].split()[:2] == ["resnet", "3"]
    assert daemon.closed


@pytest.mark.usefixtures("daemon_name")
def test_without_a_daemon_it_says_what_to_do() -> None:
    with pytest.raises(NoDaemonError, match="a DataLoader starts one"):
        creel.stats()
    with pytest.raises(NoDaemonError, match="'nobody-at-all'"):
        creel.stats("nobody-at-all")


class Marked(list[int]):
    """A dataset whose class has a name that is no HTML."""


Marked.__name__ = "a<b"


def test_a_loader_shows_what_it_reads_and_has_counted() -> None:
    loader = creel.DataLoader(Marked(range(10)), 4, shuffle=True, creel=False)  # type: ignore[arg-type,var-annotated]
    list(loader)
    cells = Cells(loader._repr_html_()).texts
    assert {"a<b of 10 samples", "4 samples, 3 an epoch", "RandomSampler", "3 batches"} <= set(
        cells
    )


class Endless:
    """A dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise TypeError("none")


def test_a_length_that_cannot_be_told_is_left_out() -> None:
    loader = creel.DataLoader(Endless(), batch_sampler=[[1], [2]], creel=False)  # type: ignore[arg-type,var-annotated]
    cells = Cells(loader._repr_html_()).texts
    assert {"Endless", "single samples, 2 an epoch", "list"} <= set(cells)
