"""The report in a real browser: zoomed, picked and read by script, its numbers equal to those of the timeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.allocator.out_of_memory import OutOfMemory
from brim.cli import main
from brim.core import EventKind, Timeline
from brim.report.html.page import Table, View, write
from brim.report.html.page import page as document_of
from brim.units import MIB
from support.simulated_recording import Recording

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs Debian's packages chromium and chromium-driver", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.thorough

HOSTILE = "</script><img src=x onerror='window.ran=1'><svg onload='window.ran=1'><!--\u2028\u202eabc`${window.ran=1}`"
Open = Callable[[Path], Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument("--window-size=1280,1400")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a report and waits for it; afterwards the browser must have found nothing to complain of."""

    def open_page(path: Path) -> Any:
        browser.get(path.as_uri())
        WebDriverWait(browser, 60).until(lambda page: page.execute_script("return !!window.brim"))
        return browser

    browser.get_log("browser")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    yield open_page
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """``brim estimate gpt2 --html --json``: the report and the JSON."""
    path = tmp_path_factory.mktemp("report") / "gpt2.html"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("brim.cli.estimate.command.print_json", lambda document: printed.append(json.dumps(document)))
        arguments = ["--batch", "2", "--seq", "128", "--gpu", "RTX 4090", "--html", str(path), "--json"]
        assert main(["estimate", "gpt2", *arguments]) == 0
    return path, json.loads(printed[0])


def figures(page: Any, path: str) -> Any:
    return page.execute_script(f"return window.brim.panels[0].{path}")


def chart(page: Any) -> Any:
    return page.find_element(By.CSS_SELECTOR, "canvas.chart")


def test_the_peak_is_that_of_the_json(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    path, document = gpt2
    page = opened(path)
    chart(page).send_keys(Keys.HOME)
    assert figures(page, "picked().allocated_bytes") < document["peak_bytes"]["allocated"]
    page.find_element(By.XPATH, "//button[text()='Peak']").click()
    picked = figures(page, "picked()")
    assert picked["allocated_bytes"] == document["peak_bytes"]["allocated"]
    assert figures(page, "reserved_peak_bytes") == document["peak_bytes"]["reserved"]
    assert sum(picked["groups"].values()) == sum(picked["module"].values()) == picked["allocated_bytes"]
    # Blocks are a little larger than the tensors in them, which the JSON counts.
    names = {"parameter": "parameters", "optimizer_state": "optimizer_state", "activation": "activations"}
    for shown, told in names.items():
        tensors = document["at_peak_bytes"][told]
        assert tensors <= picked["groups"][shown] <= tensors * 1.02 + 1_000_000
    assert f"{document['peak_bytes']['allocated']:,} bytes" in page.page_source


def test_a_verdict_the_process_and_the_part_of_the_step_are_told(
    opened: Open, gpt2: tuple[Path, dict[str, Any]]
) -> None:
    path, document = gpt2
    page = opened(path)
    assert page.find_element(By.CSS_SELECTOR, ".verdict").text.startswith("Fits with ")
    assert f"{document['peak_bytes']['process']:,} bytes" in page.page_source
    title = page.find_element(By.TAG_NAME, "h1")
    assert title.rect["height"] < 1.5 * float(title.value_of_css_property("font-size")[:-2]), "it has one line"
    chart(page).send_keys(Keys.END)
    assert "(optimizer)" in page.find_element(By.CSS_SELECTOR, ".moment").text


def test_the_address_map_adds_up_to_what_is_reserved(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    page = opened(gpt2[0])
    segments = figures(page, "segments()")
    picked = figures(page, "picked()")
    assert sum(segment["bytes"] for segment in segments) == picked["reserved_bytes"]
    pieces = [piece for segment in segments for piece in segment["pieces"]]
    assert sum(piece["bytes"] for piece in pieces if piece["owner"] >= 0) == picked["allocated_bytes"]
    page.find_element(By.CSS_SELECTOR, "canvas.map").send_keys(Keys.ARROW_RIGHT, "h")
    assert page.find_element(By.CSS_SELECTOR, ".piece").text.startswith("hole: bytes ")


def test_an_explained_recording_shows_why_it_failed(
    opened: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In four rounds a block of 61 MiB takes the place of one of 100 MiB; then 200 MiB do not fit into 500."""
    recording = Recording("", 500 * MIB)
    for _ in range(4):
        recording.free(recording.malloc(100 * MIB))
        recording.malloc(61 * MIB)
    with pytest.raises(OutOfMemory):
        recording.malloc(200 * MIB)
    run, report = tmp_path / "run.pickle", tmp_path / "report.html"
    run.write_bytes(recording.dump())
    assert main(["explain", str(run), "--html", str(report), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    failed = next(moment for moment in told["moments"] if moment["what"] == "oom")
    page = opened(report)
    text = page.find_element(By.ID, "page").text
    for part in (told["headline"], "Segments with pinned free memory: device 0, when it failed", "What to do"):
        assert part in text
    assert len(page.find_elements(By.XPATH, "//caption[contains(., 'Replayed under other settings')]")) == 1
    chart(page).send_keys(Keys.END)
    picked = figures(page, "picked()")
    assert picked["allocated_bytes"] == failed["allocated_bytes"] == 244 * MIB
    assert picked["reserved_bytes"] == failed["reserved_bytes"] == 400 * MIB
    holes = [piece["bytes"] for one in figures(page, "segments()") for piece in one["pieces"] if piece["owner"] < 0]
    assert (len(holes), max(holes), sum(holes)) == (4, failed["largest_free_bytes"], failed["free_bytes"])


def test_blocks_across_mapped_ranges_make_them_one_segment(opened: Open, tmp_path: Path) -> None:
    timeline = Timeline("expandable", measured=True)
    for number in range(4):
        timeline.add(EventKind.SEGMENT_ALLOC, "vram", 100, address=1000 + 100 * number, stream=3)
    timeline.add(EventKind.SEGMENT_ALLOC, "vram", 50, address=5000)
    timeline.add(EventKind.ALLOC, "vram", 250, address=1020, storage=1, label="wide")
    timeline.add(EventKind.SEGMENT_FREE, "vram", 60, address=1340, stream=3)
    write(tmp_path / "report.html", document_of([View(timeline=timeline)], title="t"))
    page = opened(tmp_path / "report.html")
    page.find_element(By.CSS_SELECTOR, "canvas.chart").send_keys(Keys.END)
    found = [
        (s["address"], s["bytes"], [(p["bytes"], p["owner"]) for p in s["pieces"]])
        for s in figures(page, "segments()")
    ]
    assert found == [(1000, 340, [(20, -1), (250, 0), (70, -1)]), (5000, 50, [(50, -1)])]


def test_wheel_drag_and_buttons_zoom(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    page = opened(gpt2[0])
    full = figures(page, "range()")
    canvas = chart(page)
    ActionChains(page).move_to_element(canvas).click_and_hold().move_by_offset(200, 0).release().perform()
    dragged = figures(page, "range()")
    assert full[0] < dragged[0] < dragged[1] < full[1]
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(canvas)
    ActionChains(page).scroll_from_origin(origin, 0, -200).perform()
    wheeled = figures(page, "range()")
    assert dragged[0] < wheeled[0] < wheeled[1] < dragged[1]
    page.find_element(By.XPATH, "//button[text()='All']").click()
    assert figures(page, "range()") == full


def test_everything_can_be_done_by_keyboard(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    page = opened(gpt2[0])
    full = figures(page, "range()")
    canvas = chart(page)
    canvas.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    second = figures(page, "picked().event")
    canvas.send_keys(Keys.END)
    assert second < figures(page, "picked().event") == full[1]
    canvas.send_keys(Keys.ENTER, "+", "+")
    zoomed = figures(page, "range()")
    assert zoomed[1] - zoomed[0] == pytest.approx((full[1] - full[0]) / 4)
    assert figures(page, "picked().event") == figures(page, "peak.event")
    canvas.send_keys(Keys.SHIFT, Keys.ARROW_LEFT)
    assert figures(page, "range()")[0] < zoomed[0]
    canvas.send_keys(Keys.NULL, Keys.ESCAPE)
    assert figures(page, "range()") == full
    for label in ("Pick the peak", "Show all"):
        assert page.find_element(By.CSS_SELECTOR, f"button[aria-label='{label}']").is_enabled()
    assert "4" in canvas.get_attribute("aria-label") and "peak" in canvas.get_attribute("aria-label")


def test_the_picture_is_also_a_table(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    page = opened(gpt2[0])
    page.find_element(By.XPATH, "//summary[text()='As a table']").click()
    caption = "//caption[contains(., 'Memory at moments')]/.."
    WebDriverWait(page, 10).until(lambda page: page.find_elements(By.XPATH, caption))
    exact = [cell.get_attribute("title") for cell in page.find_elements(By.XPATH, f"{caption}//td")]
    page.find_element(By.XPATH, f"{caption}/..//button").click()
    exact += [cell.get_attribute("title") for cell in page.find_elements(By.XPATH, f"{caption}//td")]
    assert f"{gpt2[1]['peak_bytes']['allocated']:,}" in exact


def test_dark_and_light_follow_the_system_and_the_button(opened: Open, gpt2: tuple[Path, dict[str, Any]]) -> None:
    page = opened(gpt2[0])

    def lightness() -> int:
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    def picture() -> str:
        return page.execute_script("return document.querySelector('canvas.chart').toDataURL()")

    light, drawn = lightness(), picture()
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    # Colours change at once, the picture with the event that the browser sends before its next frame.
    WebDriverWait(page, 60).until(lambda page: lightness() < 150 and picture() != drawn)
    assert light > 600
    page.find_element(By.CSS_SELECTOR, "button.theme").click()
    assert lightness() == light and picture() == drawn


def test_lanes_alone_are_a_page_too(opened: Open, tmp_path: Path) -> None:
    timeline = Timeline("a profile", measured=True)
    for number in range(30_000):
        timeline.add(EventKind.COMPUTE, "vram", 0, time_s=number * 2e-3, duration_s=1e-3, stream=7, label="gemm")
        timeline.add(EventKind.IDLE, "vram", 0, time_s=number * 2e-3 + 1e-3, duration_s=5e-4, label="dataloader")
    write(tmp_path / "report.html", document_of([View(timeline=timeline)], title="A profile"))
    page = opened(tmp_path / "report.html")
    lanes = page.execute_script("return window.brim.lanes")
    assert lanes == [{"name": "compute vram, stream 7", "busy_s": 30.0}, {"name": "idle vram", "busy_s": 15.0}]
    canvas = page.find_element(By.CSS_SELECTOR, "canvas.lanes")
    before = page.execute_script("return arguments[0].toDataURL()", canvas)
    canvas.send_keys("+" * 10)
    assert page.execute_script("return arguments[0].toDataURL()", canvas) != before
    canvas.send_keys(Keys.ESCAPE)
    assert page.execute_script("return arguments[0].toDataURL()", canvas) == before
    ActionChains(page).move_to_element(canvas).perform()
    assert page.find_element(By.CSS_SELECTOR, ".tooltip").text.split("\n")[0] in ("gemm", "dataloader")


@pytest.mark.parametrize("one_axis", [True, False])
def test_runs_whose_times_count_from_one_moment_are_drawn_and_zoomed_together(
    opened: Open, tmp_path: Path, one_axis: bool
) -> None:
    views = []
    for measured, took_s in ((True, 4.0), (False, 2.0)):
        timeline = Timeline("run", measured=measured)
        for number in range(20):
            timeline.add(EventKind.ALLOC, "ram", 1 << 20, time_s=took_s * number / 19, storage=number, label="block")
        timeline.add(EventKind.COMPUTE, "ram", 0, time_s=0.0, duration_s=took_s, label="forward")
        views.append(View(timeline=timeline))
    write(tmp_path / "report.html", document_of(views, title="Two runs", one_axis=one_axis))
    page = opened(tmp_path / "report.html")
    titles = [head.text for head in page.find_elements(By.CSS_SELECTOR, "section.card h2")]
    assert ["measured" in title for title in titles] == [True, False]
    assert "predicted" in titles[1]

    def ranges() -> list[list[float]]:
        return [page.execute_script(f"return window.brim.panels[{index}].range()") for index in (0, 1)]

    assert ranges() == [[0, 4e9], [0, 4e9 if one_axis else 2e9]]
    chart(page).send_keys("+")
    first, second = ranges()
    assert first != [0, 4e9]
    assert (first == second) is one_axis


def test_hostile_names_run_nothing_and_are_shown_as_they_are(opened: Open, tmp_path: Path) -> None:
    timeline = Timeline(HOSTILE, measured=True, facts={HOSTILE: 1.0})
    timeline.add(EventKind.SEGMENT_ALLOC, "vram", 1 << 30, address=0)
    for number in range(40):
        timeline.add(
            EventKind.ALLOC, "vram", 1 << 20, time_s=number, storage=number, address=number << 20,
            label=f"{HOSTILE}{number}", category=HOSTILE, stack=f"{HOSTILE}\n{HOSTILE}",
        )  # fmt: skip
        timeline.add(EventKind.COPY, HOSTILE, 10, time_s=number, duration_s=0.5, source=HOSTILE, label=HOSTILE)
    timeline.add(EventKind.OOM, "vram", 1 << 30, time_s=40.0, label=HOSTILE)
    path = tmp_path / "hostile.html"
    table = Table(title=HOSTILE, columns=(HOSTILE,), rows=((HOSTILE,),), note=HOSTILE)
    write(path, document_of([View(timeline=timeline, title=HOSTILE)], title=HOSTILE, tables=[table], notes=[HOSTILE]))
    page = opened(path)
    ActionChains(page).move_to_element(chart(page)).perform()
    page.find_element(By.CSS_SELECTOR, "canvas.map").send_keys(Keys.ARROW_RIGHT)
    for summary in page.find_elements(By.XPATH, "//summary[text()='As a table']"):
        summary.click()
    assert page.execute_script("return window.ran") is None
    assert page.execute_script("return document.images.length + document.querySelectorAll('svg').length") == 0
    assert page.find_element(By.TAG_NAME, "h1").text.startswith("</script><img src=x onerror='window.ran=1'>")
    assert "\\u202eabc" in page.find_element(By.TAG_NAME, "h1").text


def test_the_page_may_load_and_evaluate_nothing(browser: Any, gpt2: tuple[Path, dict[str, Any]]) -> None:
    browser.get(gpt2[0].as_uri())
    attempt = """
      const done = arguments[0], refused = [];
      document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
      const add = (tag, content) => document.body.append(Object.assign(document.createElement(tag), content));
      add("img", { src: "data:image/gif;base64,R0lGODlhAQABAAAAACw=" });
      add("script", { textContent: "window.ran = 1" });
      fetch("data:,x").catch(() => {});
      setTimeout(() => done([refused.sort(), window.ran ?? null]), 300);
    """
    refused, ran = browser.execute_async_script(attempt)
    assert ran is None
    assert refused == ["connect-src", "img-src", "script-src-elem"]
    browser.get_log("browser")


@pytest.fixture(scope="module")
def million() -> Timeline:
    """A million events in waves, blocks placed end to end, in ten seconds."""
    generator = np.random.default_rng(7)
    half = 500_000
    sizes = (generator.pareto(1.2, half) * 30_000).astype(np.int64) // 512 * 512 + 512
    lives = generator.integers(1, 4000, half)
    born = np.arange(half) * 2.0
    order = np.argsort(np.concatenate([born, born + lives * 2 + 1]), kind="stable")
    made = Timeline("a million", measured=True)
    places = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    for position, number in enumerate(order.tolist()):
        storage = number % half
        kind = EventKind.ALLOC if number < half else EventKind.FREE
        known = {"category": ("activation", "gradient", "temporary")[storage % 3], "stack": f"layers.{storage % 16}"}
        made.add(
            kind, "vram", int(sizes[storage]), time_s=position * 1e-5, storage=storage, address=int(places[storage]),
            **(known if number < half else {}),
        )  # fmt: skip
    return made


def test_a_million_events_zoomed_to_single_ones(opened: Open, million: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "million.html"
    assert write(path, document_of([View(timeline=million)], title="A million events")) <= 10_000_000
    page = opened(path)
    assert figures(page, "peak.allocated_bytes") == million.peak_bytes.allocated
    assert figures(page, "seen().exact") is False
    chart(page).send_keys(Keys.ENTER, "+" * 14)
    assert figures(page, "seen().exact") is True
    chart(page).send_keys(Keys.ARROW_RIGHT)
    after = figures(page, "picked()")
    kinds, sizes = np.asarray(million.column("kind")), np.asarray(million.column("bytes"))
    allocated = np.cumsum(np.where(kinds == EventKind.ALLOC, sizes, -sizes))
    peak = int(np.argmax(allocated))
    assert (after["event"], after["allocated_bytes"]) == (peak + 1, int(allocated[peak + 1]))
    assert after["exact"] and sum(after["module"].values()) == after["allocated_bytes"]
    page.execute_script("window.brim.panels[0].pick(1000)")
    far = figures(page, "picked()")
    assert not far["exact"]
    assert far["allocated_bytes"] == int(allocated[int(far["event"])])
    assert "This is the nearest" in page.find_element(By.CSS_SELECTOR, ".parts").text
