#!/usr/bin/env python3
"""Opens a page of `ferrotron report` in a headless Chromium and looks at what stands there.

    tests/report/check_page.py PAGE SCREENSHOT RUN...

PAGE must show the runs by these names. Chromium draws it without a network, moves the pointer over the first picture,
and takes a screenshot.
"""
import pathlib
import subprocess
import sys
from html.parser import HTMLParser

VOID = {"meta", "br", "circle", "path"}
# Moves the pointer over the first picture when the page is there.
POINTER = """<script>{
  const svg = document.querySelector("figure.chart svg");
  const box = svg.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
}</script>"""


class Page(HTMLParser):
    """Counts elements by name and classes, and collects the text of tables, of the tip and of the rest."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.cells, self.tip, self.bad = [], [], [], "", []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        self.bad += [value for name, value in attributes.items() if name in ("src", "href") and value]
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
            self.open.pop()

    def handle_data(self, data):
        if any(tag in ("td", "th") for tag, _ in self.open):
            self.cells[-1] += data
        if any(name == "tip" for _, name in self.open):
            self.tip += data

    def count(self, tag, name):
        return sum(1 for found, attributes in self.elements if found == tag and name in attributes.get("class", "").split())


def chromium(page, *options):
    command = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
               "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,2000", *options, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not told, told
    return done.stdout


def main(page, screenshot, *runs):
    page, screenshot = pathlib.Path(page), pathlib.Path(screenshot).resolve()
    pointed = page.with_suffix(".pointed.html")
    pointed.write_text(page.read_text().replace("</body>", POINTER + "</body>"))
    found = Page()
    found.feed(chromium(pointed, "--dump-dom"))
    assert not found.open, f"{found.open} are not closed"
    assert not found.bad, f"the page refers to {found.bad}"
    charts = found.count("figure", "chart")
    assert charts >= 5, f"{charts} pictures"
    for index, run in enumerate(runs):
        lines = found.count("path", f"c{index}")
        assert lines >= 4, f"{run} has {lines} lines"
        assert run in found.cells, f"{run} is not in {found.cells}"
    # A run that ended before the pointer's step is not there.
    assert found.tip.startswith("step ") and any(run in found.tip for run in runs), found.tip
    chromium(page, f"--screenshot={screenshot}")
    assert screenshot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and screenshot.stat().st_size > 20_000
    print(f"{charts} pictures of {len(runs)} runs; under the pointer: {found.tip}")


main(*sys.argv[1:])
