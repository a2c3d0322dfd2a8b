"""Runs campaigns: `python -m campaigns NAME ... [--count N] [--seed S]`; `all` runs every one of them."""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import sys
import time
from importlib import import_module

import onfoot
from campaigns import CAMPAIGNS
from campaigns.page import RESULTS, update


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(CAMPAIGNS)}")
    parser.add_argument("--count", type=int, help="how many attempts (default: the campaign's own)")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed and kept")
    options = parser.parse_args()
    unknown = sorted({*options.names} - {*CAMPAIGNS, "all"})
    if unknown:
        parser.error(f"unknown campaign {unknown[0]!r}; known are all, {', '.join(CAMPAIGNS)}")
    if not options.names:
        for name in CAMPAIGNS:
            print(f"{name:10} {(import_module(f'campaigns.{name}').__doc__ or '').splitlines()[0]}")
        return 0
    names = CAMPAIGNS if "all" in options.names else options.names
    return int(sum(run(name, options.count, options.seed) for name in names) > 0)


def run(name: str, count: int | None, seed: int | None) -> bool:
    """Runs one campaign and keeps its figures; whether it found anything."""
    module = import_module(f"campaigns.{name}")
    count, seed = count or module.COUNT, secrets.randbits(31) if seed is None else seed
    print(f"{name}: count {count:,}, seed {seed}", flush=True)
    begun = time.monotonic()
    outcome = module.run(count, seed)
    record = {
        "campaign": name,
        "count": count,
        "seed": seed,
        "seconds": round(time.monotonic() - begun),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "onfoot": onfoot.__version__,
        "figures": outcome.figures,
        "failures": outcome.failures,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    update()
    for failure in outcome.failures[:20]:
        print(f"  FAILED {failure}")
    print(f"{name}: {len(outcome.failures)} failures; {outcome.figures}", flush=True)
    return bool(outcome.failures)


if __name__ == "__main__":
    sys.exit(main())
