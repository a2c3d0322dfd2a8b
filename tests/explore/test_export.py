"""The exported page: one file that works from disk, with no server and no network."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from waiting import SHOWN, until

import onfoot
from onfoot.cli import app
from onfoot.models.model import Model


@pytest.fixture
def offline(watched: Any, exported: Path) -> Iterator[Any]:
    """The exported page, opened from disk without a network."""
    watched.context.set_offline(True)
    yield watched.open(exported.as_uri())
    watched.context.set_offline(False)


def test_the_file_is_self_contained(exported: Path) -> None:
    html = exported.read_text(encoding="utf-8")
    assert len(html) < 8e6
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", markup)
    (icon,) = re.findall(r'(?:src|href)="([^"#][^"]*)"', markup)
    assert icon.startswith("data:image/svg+xml;base64,")


def test_its_policy_names_its_one_script_and_its_one_style(exported: Path) -> None:
    html = exported.read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy and policy[1].startswith("default-src 'none'; ") and "unsafe" not in policy[1]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


def test_its_numbers_are_the_librarys(offline: Any, model: Model, tokens: np.ndarray) -> None:
    trace = model.trace(tokens)
    assert offline.locator("#loss").get_attribute("data-value") == str(trace.loss)
    offline.locator('.row[data-step="0.5"]').click()
    offline.wait_for_selector('.figure[data-tensor="0.Δ_5"] output.value')
    box = offline.locator('.figure[data-tensor="0.Δ_5"] .explanation')
    r, c = int(box.get_attribute("data-r")), int(box.get_attribute("data-c"))
    shown = offline.locator('.figure[data-tensor="0.Δ_5"] output.value').get_attribute("data-value")
    assert float(shown) == float(trace["Δ_5", 0][0, r, c])
    assert offline.locator('.figure[data-tensor="0.Δ_5"] .sum').get_attribute("data-right") == "true"


def test_every_step_and_every_view_works_from_disk(offline: Any) -> None:
    offline.wait_for_selector("body[data-proven]")
    for row in offline.locator(".row").all():
        if re.match(r"0\.[123]\.|1\.\d\.", row.get_attribute("data-step")):
            continue  # one head stands for the others
        row.evaluate("row => row.click()")
        until(offline, SHOWN)
        assert offline.locator('.sum[data-right="false"]').count() == 0
        assert offline.locator(".badge.waiting, .badge.failed").count() == 0
        autograd = offline.locator(".badge").evaluate_all("all => all.map(x => +x.dataset.autograd)")
        assert all(error < 1e-9 for error in autograd)
    for name, selector in {
        "Attention": "[data-fact=first-row]",
        "Training": "[data-attribution]",
        "One step": ".arithmetic .sum",
        "Mistakes": "[data-finding]",
    }.items():
        offline.get_by_role("tab", name=name).click()
        offline.wait_for_selector(selector)
    assert offline.locator(".mistake").count() == 18
    for option in offline.locator(".mistake").all()[::4]:
        key = option.get_attribute("data-key")
        option.click()
        offline.wait_for_selector(f'.mistake-result[data-key="{key}"][aria-busy=false]')
        assert offline.locator(".diagnosis[data-found=true]").count() == 1
    assert offline.locator("#text").is_disabled()


def test_a_text_of_markup_stays_text(tmp_path: Path, model: Model) -> None:
    """User input is embedded as data: it cannot close or open an element."""
    from onfoot.explore.page import single_page

    html = single_page({"opening": {"value": "</script><script>alert(1)</script>"}})
    assert "alert(1)</script>" not in html and "\\u003c/script>\\u003cscript>alert(1)" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a", "--tokens", "1 2"], "give --text or --tokens, not both"),
        (["--text", ""], "the text is empty"),
        (["--text", "9 lives"], "the character '9' is not in"),
        (["--tokens", "1 2 400"], "token id must be between 0 and 36, got 400"),
        (["/none/such"], "/none/such"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["explore", *arguments, "--export", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_model_of_another_kind_is_shown_as_well(tmp_path: Path, watched: Any) -> None:
    """Untied with a bias, not causal, ReLU, heads of two widths, no tokenizer."""
    config = onfoot.GPT2Config(
        n_layer=1, n_head=2, n_embd=6, n_positions=8, vocab_size=9, activation_function="relu", causal=False,
        tie_word_embeddings=False, lm_head_bias=True, head_dim=3, qk_head_dim=5,
    )  # fmt: skip
    onfoot.create(config, 0).save(tmp_path / "model")
    path = tmp_path / "pages" / "own.html"
    result = CliRunner().invoke(app, ["explore", str(tmp_path / "model"), "--tokens", "1 2 3 2", "--export", str(path)])
    assert result.exit_code == 0, result.output
    page = watched.open(path.as_uri())
    for row in page.locator('.row:not([data-step^="0.1."])').all():  # one head stands for the other
        row.evaluate("row => row.click()")
        until(page, SHOWN)
        assert page.locator('.sum[data-right="false"]').count() == 0
    for name, selector in {
        "Attention": "[data-fact=delta-sum]",
        "Training": "[data-attribution]",
        "One step": ".arithmetic .sum",
        "Mistakes": "main .message",
    }.items():
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector(selector)


def test_without_the_extra_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    result = CliRunner().invoke(app, ["explore", "--no-browser"])
    assert result.exit_code == 2 and 'pip install "onfoot[explore]"' in result.stderr


def test_the_command_serves_the_page_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "onfoot", "explore", "--no-browser", "--text", "the name"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stderr
        address = running.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
        port = urllib.parse.urlsplit(address).port
        assert f"ssh -L {port}:127.0.0.1:{port} " in running.stdout.readline()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.partition("?")[0], timeout=30)
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"the name" in page.read()
        try:
            running.send_signal(signal.SIGINT)
            assert running.wait(20) in (0, 130, -signal.SIGINT)
            assert "Traceback" not in running.stderr.read()
        finally:
            running.kill()
