"""The server: local only, for its own page only, serves its own files only, and explains what it rejects."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import Any

import numpy as np
import pytest

from onfoot.explore.serve import listen
from onfoot.explore.server import MAX_BODY
from onfoot.explore.study import Study


def ask(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return found


def post(port: int, value: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, body = ask(port, "/api/study", "POST", json.dumps(value).encode(), **headers)
    return status, json.loads(body)


def raw(port: int, request: bytes) -> bytes:
    """The response to bytes that no HTTP library would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_it_listens_on_loopback_only() -> None:
    with listen(0) as listening:
        address, port = listening.getsockname()
        assert address == "127.0.0.1"
        own = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for other in {*own, "127.0.0.2"} - {"127.0.0.1"}:
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=2)


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with (
        listen(0) as listening,
        pytest.raises(ValueError, match=r"cannot bind port \d+: .*; choose another with --port"),
    ):
        listen(listening.getsockname()[1])


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost.evil.example:{port}", ""]
)
def test_other_hosts_are_refused(port: int, host: str) -> None:
    status, _, body = ask(port, "/", Host=host.format(port=port))
    assert status == 421 and b"<html" not in body


def test_no_host_and_two_hosts_are_refused(port: int) -> None:
    good = f"Host: 127.0.0.1:{port}\r\n".encode()
    for hosts in (b"", good + good, good + b"Host: evil.example\r\n"):
        answer = raw(port, b"GET / HTTP/1.0\r\n" + hosts + b"\r\n")
        assert answer.split()[1] in (b"400", b"421") and b"onfoot" not in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_its_own_names_are_answered(port: int, host: str) -> None:
    assert ask(port, "/", Host=f"{host}:{port}")[0] == 200


def test_other_pages_cannot_use_it(port: int) -> None:
    text = {"text": "the name"}
    assert post(port, text, Origin="http://evil.example")[0] == 403
    assert post(port, text, Origin="null")[0] == 403
    assert post(port, text, Sec_Fetch_Site="cross-site")[0] == 403
    assert post(port, text, Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin")[0] == 200


def test_every_answer_carries_the_policy(port: int) -> None:
    for path in ("/", "/app.js", "/style.css", "/icon.svg", "/onfoot-math.woff2", "/nothing", "/api/study/0/training"):
        _, headers, _ = ask(port, path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy and "*" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_the_page_has_no_inline_handlers_and_nothing_from_elsewhere(port: int) -> None:
    html = ask(port, "/")[2].decode()
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", markup)
    for source in (html, ask(port, "/app.js")[2].decode(), ask(port, "/style.css")[2].decode()):
        addresses = [part.split('"')[0] for part in source.split('"http')[1:]]
        assert [a for a in addresses if "www.w3.org" not in a] == []  # names of XML vocabularies, not addresses
        assert "@import" not in source and source.count("url(") == source.count('url("onfoot-math.woff2")')


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/page.html",
        "/page.html", "/default/config.json", "//etc/passwd", "/app.js/../server.py",
        "/api/study/../../etc/passwd/training", "/api/study/x/tensor?id=../../etc/passwd",
    ],
)  # fmt: skip
def test_nothing_but_its_own_files_is_served(port: int, path: str) -> None:
    status, _, body = ask(port, path)
    assert status == 404
    assert set(json.loads(body)) == {"message"}


def test_other_methods_are_refused(port: int) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST"):
        assert ask(port, "/", method)[0] == 405


def test_large_requests_are_refused(port: int) -> None:
    assert ask(port, "/api/study", "POST", b"x" * (MAX_BODY + 1))[0] == 413
    head = f"POST /api/study HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    assert b" 413 " in raw(port, f"{head}Content-Length: 99999999999\r\n\r\n".encode())
    chunk = b"%x\r\n%s\r\n" % (40_000, b"x" * 40_000)
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk + chunk + b"0\r\n\r\n"
    assert b" 413 " in raw(port, chunked).split(b"\r\n")[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 60_000])
def test_requests_that_are_not_a_json_object_are_refused(port: int, body: bytes) -> None:
    assert ask(port, "/api/study", "POST", body)[0] == 400


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"text": ""}, "the text is empty"),
        ({"text": "é"}, "the character 'é'"),
        ({"text": "a" * 65}, "65 tokens exceed the limit of 64"),
        ({"ids": "1 400"}, "token id must be between 0 and 36, got 400"),
        ({"text": 3}, "expected {"),
        ({"text": "ab", "more": 1}, "expected {"),
        ({}, "expected {"),
    ],
)
def test_bad_texts_are_answered_with_a_message(port: int, asked: dict[str, Any], message: str) -> None:
    status, answer = post(port, asked)
    assert status == 200 and message in answer["refused"] and "document" not in answer


def test_arrays_are_sent_as_float64_whole_or_by_line(port: int, study: Study) -> None:
    _, answer = post(port, {"text": "the value of the value"})
    key = answer["document"]["key"]
    assert key == study.key

    def numbers(query: str) -> np.ndarray:
        status, headers, body = ask(port, f"/api/study/{key}/tensor?{query}")
        assert status == 200 and headers["content-type"] == "application/octet-stream"
        return np.frombuffer(body, "<f8")

    right = study.tensors.value("0.a_7")
    assert np.array_equal(numbers("id=0.a_7"), right.ravel())
    assert np.array_equal(numbers("id=0.a_7&row=3"), right[3])
    assert np.array_equal(numbers("id=0.a_7&column=100"), right[:, 100])
    assert numbers("id=n").tolist() == [21]
    for query, message in {
        "id=0.a_7&row=22": "row must be between 0 and 21, got 22",
        "id=0.a_7&column=-1": "column must be between 0 and 127, got -1",
        "id=0.a_7&row=x": "row must be a number, got 'x'",
        "id=0.a_7&row=nan": "row must be between -1e9 and 1e9, got nan",
    }.items():
        assert message in json.loads(ask(port, f"/api/study/{key}/tensor?{query}")[2])["refused"]
    assert ask(port, f"/api/study/{key}/tensor?id=none")[0] == 404
    assert ask(port, f"/api/study/{key}/tensor")[0] == 404
    assert ask(port, f"/api/study/{'0' * 16}/tensor?id=a_1")[0] == 404


def test_only_the_last_texts_are_kept(port: int) -> None:
    keys = [post(port, {"text": text})[1]["document"]["key"] for text in ("aa", "bb", "cc", "dd", "ee")]
    assert ask(port, f"/api/study/{keys[0]}/lora")[0] == 404
    assert b"run the text again" in ask(port, f"/api/study/{keys[0]}/lora")[2]
    assert ask(port, f"/api/study/{keys[-1]}/lora")[0] == 200


def test_optimizer_steps_are_checked(port: int) -> None:
    key = post(port, {"text": "the name"})[1]["document"]["key"]
    for query, message in {
        "lr=0&steps=1": "lr must be > 0 and <= 1.0, got 0.0",
        "lr=1e-3&steps=99": "steps must be between 1 and 20, got 99",
        "lr=x&steps=1": "lr must be a number, got 'x'",
        "lr=inf&steps=1": "lr must be between -1e9 and 1e9, got inf",
    }.items():
        assert message in json.loads(ask(port, f"/api/study/{key}/optimizer?{query}")[2])["refused"]


def test_the_proofs_of_at_most_16_steps_can_be_requested_together(port: int, study: Study) -> None:
    key = post(port, {"text": "the value of the value"})[1]["document"]["key"]
    found = json.loads(ask(port, f"/api/study/{key}/proof?step=0.5,1.6")[2])["proofs"]
    assert found == {**study.differences("0.5"), **study.differences("1.6")}
    many = ",".join(["0.5"] * 17)
    assert (
        "at most 16 steps per request, got 17"
        in json.loads(ask(port, f"/api/study/{key}/proof?step={many}")[2])["refused"]
    )
    assert ask(port, f"/api/study/{key}/proof?step=0.5,none")[0] == 404
