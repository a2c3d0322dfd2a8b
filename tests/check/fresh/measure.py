"""Measures what the checker finds and names in a half of the corpus, in two processes.

    python tests/check/fresh/measure.py development [--out FILE] [--only NAME] [--judge FILE]

Whether something was found, and which gradients, is compared with what each case declares. Whether the names are right
is judged by a reader, who compares the printed names with the case's `mistake`. The judgements are kept in
labels_<half>.json, each with a digest of the names it was made for: a label of other names is stale and does not count.
--judge adds judgements from a file with lines such as `flash_bwd_v3 first`.

  first         the mistake, or each of two, is named; a reader goes straight to the faulty line
  among three   it is named, but after something else
  none          nothing is named, or something true that does not lead to the line
  misnamed      something is named that the function does not do
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LABELS = ("first", "among three", "none", "misnamed")
PROCESSES = 2
SETS = ("development", "final", "third", "fourth")


def cases_of(half: str) -> dict[str, Any]:
    """The cases of a half by the names of their functions."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return {case.function.__name__: case for case in importlib.import_module(half).CASES}


def checked(half: str, name: str) -> dict[str, Any]:
    """What the checker says about one case."""
    from onfoot.check.known import check_layer
    from onfoot.check.layers import LAYERS

    case = cases_of(half)[name]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_layer(LAYERS[case.layer], case.function, **case.options)
    seconds = time.process_time() - start
    wrong = [g for g in report.layer.gradients if _is_wrong(report, g)]
    found = report.diagnosis
    findings = [] if found is None or report.passed else found.findings
    names = [f"{f.name}{', ' if f.value else ''}{f.value}" for f in findings]
    names += [] if found is None or report.passed else [" + ".join(one) for one in found.also]
    return {
        "case": name,
        "layer": case.layer,
        "mistake": case.mistake,
        "declared": list(case.wrong),
        "wrong": wrong,
        "passed": report.passed,
        "names": names[:3],
        "fixes": [f.fix for f in findings][:3],
        "gradients": [f.gradients for f in findings][:3],
        "unexplained": [] if found is None else found.unexplained,
        "residual": found.residual if found is not None and findings else None,
        "seconds": round(seconds, 2),
    }


def _is_wrong(report: Any, gradient: str) -> bool:
    """Whether a gradient is wrong in a case that counts, by its values or by its shape."""
    outcomes = [o for o in report.failed if o.answer.gradients is not None]
    return any(all(m.gradient != gradient or not m.ok for m in o.measured) for o in outcomes)


def digest(names: list[str]) -> str:
    """A short digest of the names, to notice that a label is about other ones."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def measure(half: str, only: str | None = None) -> list[dict[str, Any]]:
    """The results of all cases of a half, or of those whose name contains `only`, in their order."""
    names = [name for name in cases_of(half) if only is None or only in name]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(min(PROCESSES, len(names))) as pool:
        found = []
        for result in pool.imap(_checked, [(half, name) for name in names]):
            found.append(result)
            print(f"{len(found)} of {len(names)}: {result['case']}", file=sys.stderr, flush=True)
        return found


def _checked(given: tuple[str, str]) -> dict[str, Any]:
    return checked(*given)


def labels_path(half: str) -> Path:
    return HERE / f"labels_{half}.json"


def read_labels(half: str) -> dict[str, dict[str, str]]:
    path = labels_path(half)
    return json.loads(path.read_text()) if path.exists() else {}


def add_labels(half: str, results: list[dict[str, Any]], lines: list[str]) -> None:
    """Adds the judgements `case label` to the labels, with the digests of the names they are about."""
    labels, by_name = read_labels(half), {r["case"]: r for r in results}
    for line in lines:
        case, label = line.split(maxsplit=1)
        if label not in LABELS:
            raise ValueError(f"{label!r} of {case} must be one of {', '.join(LABELS)}")
        labels[case] = {"label": label, "digest": digest(by_name[case]["names"])}
    labels_path(half).write_text(json.dumps(dict(sorted(labels.items())), indent=1) + "\n")


def label_of(result: dict[str, Any], labels: dict[str, dict[str, str]]) -> str:
    """The judgement of a wrong case; nothing named is "none" without a judge."""
    if not result["names"]:
        return "none"
    known = labels.get(result["case"])
    if known is None:
        return "not judged"
    return known["label"] if known["digest"] == digest(result["names"]) else "stale"


def totals(results: list[dict[str, Any]], labels: dict[str, dict[str, str]]) -> dict[str, Any]:
    wrong = [r for r in results if r["mistake"] is not None]
    right = [r for r in results if r["mistake"] is None]
    counts = dict.fromkeys((*LABELS, "not judged", "stale"), 0)
    for r in wrong:
        counts[label_of(r, labels)] += 1
    return {
        "wrong": len(wrong),
        "found": sum(not r["passed"] for r in wrong),
        "named first": counts["first"],
        "named among three": counts["first"] + counts["among three"],
        "misnamed": counts["misnamed"],
        "nothing named": sum(not r["names"] for r in wrong),
        "not judged": counts["not judged"],
        "stale": counts["stale"],
        "right": len(right),
        "false alarms": sum(not r["passed"] for r in right),
        "gradients": sum(len(r["declared"]) for r in wrong),
        "gradients misjudged": sum(len({*r["declared"]} ^ {*r["wrong"]}) for r in results),
        "median seconds": sorted(r["seconds"] for r in results)[len(results) // 2],
        "most seconds": max(r["seconds"] for r in results),
    }


def table(results: list[dict[str, Any]], labels: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    for r in results:
        label = label_of(r, labels) if r["mistake"] is not None else "right" if r["passed"] else "FALSE ALARM"
        verdict = "" if r["declared"] == r["wrong"] else f", but wrong are {','.join(r['wrong']) or '-'}"
        lines.append(f"{r['layer']:22} {r['case']:32} {label:12} {r['seconds']:6.1f} s{verdict}")
        if r["mistake"] is not None:
            residual = "" if r["residual"] is None else f"   residual {r['residual']:.1e}"
            lines.append(f"    declared  {','.join(r['declared'])}: {r['mistake']}{residual}")
            for name, fix, where in zip(r["names"], [*r["fixes"], "", ""], [*r["gradients"], [], []], strict=False):
                lines.append(f"    named     {name} [{','.join(where)}]   fix: {fix}")
            if r["unexplained"]:
                lines.append(f"    unexplained {','.join(r['unexplained'])}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=SETS)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--only", help="only the cases whose name contains this")
    parser.add_argument("--judge", type=Path, help="add the judgements in this file to the labels")
    given = parser.parse_args()
    results = measure(given.half, given.only)
    if given.judge:
        add_labels(given.half, results, [line for line in given.judge.read_text().splitlines() if line.strip()])
    labels = read_labels(given.half)
    print("\n".join(table(results, labels)))
    found = totals(results, labels)
    print("\n" + "\n".join(f"{name:22} {value}" for name, value in found.items()))
    if given.out:
        given.out.write_text(json.dumps({"totals": found, "cases": results}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
