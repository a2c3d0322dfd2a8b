"""How long `onfoot explore` takes to show its first numbers: `python benchmarks/explore_load.py`.

Measures the command from its start to its address, and the page from the request to numbers that can be read.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

from playwright.sync_api import sync_playwright

RUNS = 7


def main() -> None:
    path = os.environ.get("ONFOOT_CHROMIUM") or shutil.which("chromium")
    starts, loads, sizes = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(RUNS):
            began = time.perf_counter()
            command = [sys.executable, "-m", "onfoot", "explore", "--no-browser"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout
                address = running.stdout.readline().split()[0]
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
                starts.append(time.perf_counter() - began)
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.add_init_script(SEEN)
                page.goto(address, wait_until="commit")
                while not (seen := page.evaluate("window.seen")):
                    time.sleep(0.05)
                loads.append(seen / 1000)
                entries = page.evaluate("performance.getEntries().map(x => x.decodedBodySize || 0)")
                sizes.append(sum(entries))
                page.close()
                running.send_signal(signal.SIGINT)
                running.wait()
        browser.close()
    print(f"the command, to its address:        {_summary(starts)}")
    print(f"the page, to its first numbers:     {_summary(loads)}")
    print(f"bytes that the page fetches:        {max(sizes):,}")


# notes when the first number with its terms is painted, on the page's own clock, which begins with the request
SEEN = """
new MutationObserver((_, watching) => {
  if (!document.querySelector(".detail .sum")) return;
  watching.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.seen = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""


def _summary(times: list[float]) -> str:
    return f"median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f} s of {len(times)}"


if __name__ == "__main__":
    main()
