"""Reports: the figures, the HTML file, the command; in a browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from simulated import flash_attn, simulate, small

from pybuild.cli.report import command
from pybuild.events import Began, Ended, Event, Memory, Over, Planned, Reading, Step
from pybuild.units import GIB
from pybuild.view.record import Build, head_of, read_build, recording
from pybuild.view.report import PHASES, Report, render_html, report_of, ticks

FAKES = Path(__file__).parent / "fakes/builds"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def build_of(*events: Event, package: str = "flash-attn", **flags: object) -> Build:
    head = head_of(package, ["pybuild", "build", package], {"release": "cu130", **flags})
    return Build("20260101-000000-x", head, events)


@pytest.fixture(scope="module")
def full() -> Report:
    """A report of all 73 kernels of flash-attn."""
    return report_of(build_of(*simulate(flash_attn(), jobs=16, budget=32 * GIB, tick=3.0)))


# Figures


def test_the_figures_of_a_build() -> None:
    report = report_of(
        build_of(
            Planned(0.0, "p", ("a", "b"), ("b",), 2, 8 * GIB, ("sm_100",)),
            Step(0.0, "inputs"),
            Step(4.0, "compile"),
            Memory(4.0, 0, 8 * GIB, 9 * GIB, 1),
            Began(10.0, "a"),
            Reading(11.0, "a", "cudafe++", 1 * GIB),
            Memory(11.0, 1 * GIB, 8 * GIB, 9 * GIB, 0),
            Reading(20.0, "a", "cicc", 5 * GIB),
            Memory(20.0, 5 * GIB, 8 * GIB, 9 * GIB, 0),
            Reading(30.0, "a", "ptxas", 2 * GIB),
            Ended(40.0, "a", True, 28.0, 5 * GIB),
            Memory(40.0, 0, 8 * GIB, 9 * GIB, 0),
            Over(50.0, wheels=("dist/p.whl",)),
        )
    )
    assert (report.seconds, report.cpu_seconds, report.peak, report.peak_time) == (50.0, 28.0, 5 * GIB, 20.0)
    a, b = report.kernels
    assert (a.state, a.seconds, a.waited, b.state) == ("done", 30.0, 6.0, "stored")
    # What runs before the first tool is seen is counted to it.
    assert [(p.tool, p.start, p.end) for p in a.phases] == [
        ("cudafe++", 10.0, 20.0),
        ("cicc", 20.0, 30.0),
        ("ptxas", 30.0, 40.0),
    ]
    assert [(s.tool, s.start, s.end) for s in report.steps] == [("inputs", 0.0, 4.0), ("compile", 4.0, 50.0)]
    by_time = {point.time: dict(zip(PHASES, point.by_phase, strict=True)) for point in report.memory}
    assert by_time[11.0]["host"] == 1 * GIB
    assert by_time[20.0]["cicc"] == 5 * GIB
    assert sum(by_time[40.0].values()) == 0


def test_the_peak_is_in_the_chart_however_many_readings_there_are() -> None:
    events = [Memory(float(n), 7 * GIB if n == 777 else n, 8 * GIB, 0, 0) for n in range(5000)]
    report = report_of(build_of(*events))
    assert len(report.memory) <= 600
    assert max(point.used for point in report.memory) == 7 * GIB


def test_axes_have_round_values() -> None:
    assert ticks(34.0, (1, 2, 5, 10, 20), 5) == [0, 10, 20, 30]
    assert ticks(0.0, (1, 2), 5) == [0]
    assert ticks(1e9, (1,), 5) == [0, 1e9]


# HTML

VOID = {"meta", "br", "hr", "img", "link", "input"}
SELF_CLOSING = {"path"}


class Balance(HTMLParser):
    """Fails where an element is not closed by its own tag; keeps what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        loading = {"src", "href", "data", "srcset", "action", "poster", "xlink:href", "background"}
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in loading]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SELF_CLOSING | VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Balance:
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


RECORDS = ["success", "compiler-error", "out-of-memory", "network", "ctrl-c"]


@pytest.mark.parametrize("kind", RECORDS)
def test_a_report_of_every_end_is_well_formed_and_needs_nothing_else(kind: str) -> None:
    text = render_html(report_of(read_build(FAKES / f"{kind}.jsonl")))
    page = read(text)
    assert page.loads == []
    assert not re.search(r"url\(|@import|https?://", text.replace("http://cache.invalid", ""))
    assert "$" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert {"success": "done", "ctrl-c": "stopped"}.get(kind, "failed") in page.text
    if kind == "compiler-error":
        assert "'undefined_name' was not declared in this scope" in page.text


def test_every_kernel_and_every_fact_is_in_the_report(full: Report) -> None:
    page = read(render_html(full))
    for name in flash_attn():
        assert page.text.count(name) >= 2, "in the chart and in the table"
    for fact in ("sm_100", "cu130", "32.0 GiB", "at most 16"):
        assert fact in page.text


def test_what_a_build_says_is_text_and_never_markup() -> None:
    evil = "<script>alert(1)</script>&\"'$title"
    build = build_of(
        Planned(0.0, evil, (evil,), (), 1, GIB, (evil,)),
        Step(0.0, evil),
        Began(0.0, evil),
        Reading(1.0, evil, evil, GIB),
        Memory(1.0, GIB, GIB, GIB, 0),
        Over(9.0, error=evil, wheels=(evil,)),
        package=evil,
        flag=evil,
    )
    text = render_html(report_of(build))
    page = read(text)
    assert text.count("<script>") == 1
    assert page.text.count(evil) >= 5


@pytest.mark.parametrize("events", [(), (Planned(0.0, "p", (), (), 1, 0),), (Over(0.0),), (Began(0.0, "a"),)])
def test_a_build_that_came_to_nothing_has_a_report(events: tuple[Event, ...]) -> None:
    read(render_html(report_of(build_of(*events))))


def test_a_machine_far_larger_than_the_budget_does_not_flatten_the_chart(full: Report) -> None:
    large = full.model_copy(update={"machine": 2000 * GIB})
    assert "2000.0 GiB, beyond this chart" in render_html(large)
    assert 'class="machine"' not in render_html(large)
    assert 'class="machine"' in render_html(full.model_copy(update={"machine": 40 * GIB}))


# The command


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recorded build in the state directory beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with recording(head_of("flash-attn", ["pybuild", "build"], {})) as recorder:
        assert recorder is not None
        for event in simulate(small(), jobs=2, budget=4 * GIB):
            recorder(event)
    return tmp_path


def test_the_command_writes_a_file_and_prints_its_path(kept: Path) -> None:
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0
    (path,) = kept.glob("*.html")
    assert done.stdout == f"{path.name}\n"
    read(path.read_text())
    other = CliRunner().invoke(command, ["--output", "r.html"])
    assert other.stdout == "r.html\n"
    assert (kept / "r.html").read_text() == path.read_text()


def test_json_has_the_same_figures(kept: Path) -> None:
    done = CliRunner().invoke(command, ["--json"])
    report = Report.model_validate(json.loads(done.stdout))
    assert [kernel.name for kernel in report.kernels] == ["alpha", "beta", "gamma"]
    assert not list(kept.glob("*.html"))


def test_a_list_and_a_name(kept: Path) -> None:
    (name,) = CliRunner().invoke(command, ["--list"]).stdout.split()
    assert CliRunner().invoke(command, [name]).stdout == f"pybuild-{name}.html\n"
    record = FAKES / "success.jsonl"
    assert CliRunner().invoke(command, [str(record)]).stdout == "pybuild-success.html\n"


# In a browser

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]

# The report in frames of several widths: how wide it becomes in each, and what its elements are coloured.
FRAMES = """<!doctype html><meta charset="utf-8"><body><script>
const widths = [360, 768, 1280];
const found = {};
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.srcdoc = REPORT;
  frame.onload = () => {
    const page = frame.contentDocument;
    const seen = page.querySelector(".track i.cicc").getBoundingClientRect();
    page.querySelector("th:nth-child(4) button").click();
    found[width] = {
      scroll: page.documentElement.scrollWidth, client: page.documentElement.clientWidth,
      bar: [seen.width, seen.height], paper: getComputedStyle(page.body).backgroundColor,
      first: page.querySelector("tbody tr td").textContent,
    };
    if (Object.keys(found).length == widths.length) document.title = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_in_a_browser_it_fits_a_phone_and_a_desktop_and_its_table_is_sorted(full: Report, tmp_path: Path) -> None:
    script = json.dumps(render_html(full)).replace("</", "<\\/")
    page = tmp_path / "frames.html"
    page.write_text(FRAMES.replace("REPORT", script))
    argv = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*argv, f"file://{page}"], capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    found = json.loads(html.unescape(title[1]))
    slowest = max(full.kernels, key=lambda kernel: kernel.seconds).name
    for width, seen in found.items():
        assert seen["scroll"] <= seen["client"], f"at {width} pixels it has to be scrolled sideways"
        assert min(seen["bar"]) > 0
        assert seen["first"] == slowest
