"""The figures of the documentation that come from benchmarks/*.json: `python benchmarks/tables.py` rewrites them.

On a page, a table stands between `<!-- table: NAME -->` and `<!-- end -->`, a paragraph with figures between
`<!-- figures: NAME -->` and `<!-- end -->`. tests/docs/test_tables.py fails if one is not what the benchmarks say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- (?:table|figures): ([\w-]+) -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)
NEW_TOKENS = 64  # that a job of generation makes
NAMES = {"eager": "eager", "compile": "compile", "peft": "HF + PEFT", "transformers": "transformers"}
PEERS = {
    "full-4x256": "full step, GPT-2 124M, 4 × 256",
    "full-1x1024": "full step, GPT-2 124M, 1 × 1024",
    "full-clipped": "full step with clipping (the trainer's default), 4 × 256",
    "lora-4x256": "LoRA r = 16 step, GPT-2 124M, 4 × 256",
    "small-12x64": "small GPT-2 (4 blocks of width 128), 12 × 64",
    "llama-full": "full step, SmolLM2's shape (134.5M), 2 × 256",
    "llama-lora": "LoRA r = 16 step on all linear layers, SmolLM2's shape, 2 × 256",
    "llama-small": "small LLaMA (4 blocks of width 128), 12 × 64",
    "llama-small-lora": "LoRA step of the small LLaMA",
    "generate": "generation, GPT-2 124M, batch 1",
    "generate-int8": "generation with 8-bit weights, GPT-2 124M (the peer in float32)",
    "llama-generate": "generation, SmolLM2's shape",
}
REVISIONS = {
    "full-4x256": "full step, GPT-2 124M, 4 × 256",
    "full-1x1024": "full step, GPT-2 124M, 1 × 1024",
    "lora-4x256": "LoRA step, GPT-2 124M",
    "llama-full": "full step, SmolLM2's shape",
    "llama-lora": "LoRA step, SmolLM2's shape",
    "small-12x64": "small GPT-2, 12 × 64",
    "llama-small": "small LLaMA, 12 × 64",
    "llama-small-lora": "LoRA step of the small LLaMA",
    "generate": "64 tokens, GPT-2 124M",
    "generate-int8": "64 tokens, 8-bit weights",
    "llama-generate": "64 tokens, SmolLM2's shape",
    "generate-small": "48 tokens, small GPT-2",
}
SECOND_ORDER = {
    "gpt2, 6 blocks of width 384": "GPT-2, 6 blocks of width 384, 4 × 256 tokens",
    "the same, LoRA": "its LoRA, r = 8",
    "llama, 6 blocks of width 384": "LLaMA, 6 blocks of width 384, 4 × 256 tokens",
    "gpt2, 4 blocks of width 128": "GPT-2, 4 blocks of width 128, 12 × 64 tokens",
}
BLAME = {
    "train, lr 0.0003": ("training from scratch, 300 steps, groups of 5 %", "3e-4"),
    "train, lr 0.001": ("the same", "1e-3"),
    "lora, lr 0.0005": ("LoRA, 56 steps, groups of 10 %", "5e-4"),
    "lora, lr 0.002": ("the same", "2e-3"),
}


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(head: list[str], align: str, rows: Iterator[list[str]]) -> str:
    """A Markdown table; `align` has l or r for each column."""
    marks = ["---:" if one == "r" else "---" for one in align]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def ms(seconds: float, digits: int = 1) -> str:
    """Milliseconds: whole ones from 1,000 on, or from 100 if `digits` is 0."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= (1000 if digits else 100) else f"{value:,.1f} ms"


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def peers() -> str:
    jobs = figures("peers")["jobs"]

    def cell(job: str, one: dict[str, Any]) -> str:
        speed = f"{NEW_TOKENS / one['seconds']:.1f} tokens/s" if "generate" in job else ms(one["seconds"])
        return f"{speed}, {mb(one['peak_bytes'])}"

    def rows() -> Iterator[list[str]]:
        for job, about in PEERS.items():
            ours, *others = jobs[job]
            speed = min(one["seconds"] for one in others) / ours["seconds"]
            memory = ours["peak_bytes"] / min(one["peak_bytes"] for one in others)
            text = "; ".join(f"{NAMES[one['contender']]} {cell(job, one)}" for one in others)
            yield [about, cell(job, ours), text, f"{speed:.2f} ×", f"{memory:.2f} ×"]

    return table(["job", "onfoot", "peers", "speed / best peer", "memory / least"], "lrrrr", rows())


def revisions() -> str:
    jobs = figures("revisions")["jobs"]

    def rows() -> Iterator[list[str]]:
        for job, about in REVISIONS.items():
            one = jobs[job]
            before = f"{ms(one['old_seconds'])}, {mb(one['old_bytes'])}"
            now = f"{ms(one['new_seconds'])}, {mb(one['new_bytes'])}"
            yield [about, before, now, f"{one['speed']:.2f} ×", f"{one['memory']:.2f} ×"]

    return table(["job", "before", "now", "speed", "memory"], "lrrrr", rows())


def busy() -> str:
    jobs = figures("busy")["jobs"].items()
    rows = ([job, f"{x['alone_ms']:.2f} ms", f"{x['busy_ms']:.2f} ms", f"{x['times']:.2f} ×"] for job, x in jobs)
    return table(["job", "alone", "busy", "slower"], "lrrr", rows)


def second_order() -> str:
    jobs = figures("second_order")["jobs"]

    def cell(one: dict[str, Any]) -> str:
        return f"{ms(one['seconds'], 0)}, {mb(one['peak_bytes'])}"

    def rows() -> Iterator[list[str]]:
        for job, about in SECOND_ORDER.items():
            x = jobs[job]
            gradient = x["gradient"]["seconds"]
            newton = x["gauss-newton"]["seconds"]
            row = [about, cell(x["gradient"]), f"{cell(x['hessian'])} ({x['hessian']['seconds'] / gradient:.2f} ×)"]
            row.append(f"{ms(newton, 0)} ({newton / gradient:.2f} ×)")
            if "torch gradient" in x:
                times = x["torch hessian"]["seconds"] / x["torch gradient"]["seconds"]
                row += [cell(x["torch gradient"]), f"{cell(x['torch hessian'])} ({times:.2f} ×)"]
            else:
                row += ["–", "–"]
            yield row

    head = ["model", "gradient", "H u", "Gauss–Newton", "PyTorch: gradient", "PyTorch: H u"]
    return table(head, "lrrrrr", rows())


def growth() -> str:
    def rows() -> Iterator[list[str]]:
        for what, series in figures("growth")["series"].items():
            for x in series:
                sizes = [str(x["blocks"]), str(x["batch"]), str(x["tokens"])]
                cells = [f"{x[f'{who} ms']:,.0f} ms, {x[f'{who} MB']:,.0f} MB" for who in ("onfoot", "eager")]
                yield [what.replace(" a ", " per "), *sizes, *cells]

    return table(["what grows", "blocks", "sequences", "tokens", "onfoot", "PyTorch eager"], "lrrrrr", rows())


def time_to_loss() -> str:
    found = figures("time_to_loss")

    def rows() -> Iterator[list[str]]:
        for who, curve in found["curves"].items():
            seconds, loss = curve[-1]
            reached = found["seconds"][who]
            name = f"`{who}`" if who.startswith("onfoot") else who
            yield [name, f"{loss:.3f}", f"{seconds:.0f} s", f"{reached:.1f} s" if reached else "–"]

    head = ["", "nats per byte at the end", "after", f"{found['goal']:.3f} nats per byte after"]
    return table(head, "llll", rows())


def blame() -> str:
    found = figures("blame")

    def number(x: float) -> str:
        return f"{x:.3f}" if x > 0.9 else f"{x:.2f}"

    def rows() -> Iterator[list[str]]:
        for name, (about, rate) in BLAME.items():
            groups = next(x for key, x in found[name].items() if key.startswith("groups"))
            parts = (found[name]["single examples"], groups)
            yield [about, rate, *(number(x[how]["pearson"]["mean"]) for x in parts for how in ("exact", "tracin"))]

    return table(["run", "learning rate", "single examples", "TracIn", "groups", "TracIn"], "lrrrrr", rows())


def private() -> str:
    def rows() -> Iterator[list[str]]:
        for case, who in figures("private")["cases"].items():
            row = [case]
            for name in ("onfoot", "opacus"):
                for what in ("seconds", "peak_bytes"):
                    one = who.get(name, {}).get(what)
                    row.append(f"{one['private'] / one['ordinary']:.2f} ×" if one else "–")
            yield row

    return table(["model", "time", "memory", "Opacus: time", "Opacus: memory"], "lrrrr", rows())


def serving() -> str:
    def rows() -> Iterator[list[str]]:
        for what, x in figures("serving")["tokens per second"].items():
            one, several = x["one client"], x["8 clients"]
            yield [what, f"{one:.0f} tokens/s", f"{several:.0f} tokens/s", f"{several / one:.1f} ×"]

    return table(["model", "one client", "eight clients together", ""], "lrrr", rows())


def sixteen_bit() -> str:
    jobs = figures("sixteen_bit")["jobs"]
    names = {
        "generate, float32": "generation, float32",
        "generate, bfloat16": "generation, bfloat16",
        "generate, transformers float32": "generation, transformers in float32",
        "LoRA step, float32": "LoRA step, float32",
        "LoRA step, bfloat16": "LoRA step, bfloat16",
    }
    rows = (
        [about, f"{jobs[job]['tokens_per_second']:.1f}", mb(jobs[job]["peak_bytes"])] for job, about in names.items()
    )
    return table(["", "tokens/s", "peak memory"], "lrr", rows)


def masked_rows() -> str:
    gpt2, smollm2, small = (f"{job['gain']:.2f}" for job in figures("masked_rows")["jobs"])
    return (
        "Tokens without a target need no logits. With 70 % of the tokens in prompts, a LoRA step of GPT-2 124M is "
        f"{gpt2} times as fast, "
        f"of SmolLM2-135M {smollm2} times,\nand a full step of a model of width 128 with 32,000 tokens {small} times "
        "([`benchmarks/masked_rows.py`](../benchmarks/masked_rows.py), the same machine; the losses are equal to "
        "the bit)."
    )


def recipes(name: str) -> str:
    rows = (
        [setting, f"{x['steps']}", f"{x['nats per byte']:.3f}", f"{x['lowest']:.3f}"]
        for setting, x in figures(name)["runs"].items()
    )
    return table(["one setting changed", "steps", "nats per byte at the end", "lowest"], "lrrr", rows)


def recipe() -> str:
    return recipes("recipe")


def recipe_longer() -> str:
    return recipes("recipe_longer")


def more_text() -> str:
    found = figures("more_text")
    rows = [
        ["xz -9 after the rest of the reference", "", f"{found['xz -9 after the reference']:.3f}"],
        ["xz -9 after the same text", "", f"{found['xz -9 after the same text']:.3f}"],
        *([f"{x['steps']:,} steps", f"{x['seconds']:.0f} s", f"{x['nats per byte']:.3f}"] for x in found["curve"]),
    ]
    return table(["", "after", "nats per byte"], "lrr", rows)


def gain() -> str:
    """How much sooner the goal of the time to a loss is reached than by the faster of the peers."""
    seconds = figures("time_to_loss")["seconds"]
    ours = seconds["onfoot train"]
    return f"{min(x for who, x in seconds.items() if x and who != 'onfoot train') / ours:.1f}"


def time_gain() -> str:
    return (
        f"That is {gain()} times as fast. Most of it is the recipe (1,024 BPE tokens instead of bytes, blocks of "
        "the LLaMA kind, a higher "
        "learning rate), not the kernels."
    )


def readme_time() -> str:
    found = figures("time_to_loss")
    ours, theirs = found["seconds"]["onfoot train"], found["seconds"]["PyTorch, compiled"]
    return (
        f"nanoGPT's settings for a CPU reach {found['goal']:.2f} nats per byte on this text in PyTorch after 2,000 "
        "steps. `onfoot train` gets there "
        f"{float(gain()):.0f} times as fast ({ours:.1f} against {theirs:.1f} s on a 2-core\nAMD EPYC; [how it was "
        "measured](docs/performance.md#time-to-a-loss), [figures](benchmarks/time_to_loss.json))."
    )


def readme_speed() -> str:
    jobs = figures("peers")["jobs"]

    def times(job: str, digits: int = 2) -> str:
        ours, *others = jobs[job]
        return f"{min(x['seconds'] for x in others) / ours['seconds']:.{digits}f}"

    def memory(job: str) -> str:
        ours, *others = jobs[job]
        return f"{ours['peak_bytes'] / min(x['peak_bytes'] for x in others):.2f}"

    def both(job: str) -> str:
        return f"{times(job)} times as fast with {memory(job)} of the memory"

    return (
        "Measured on a 2-core Intel Xeon (AVX-512) with two threads, in the same run as the peers (the better of "
        "PyTorch eager and\n"
        f"`torch.compile`, or transformers and PEFT): a full training step of GPT-2 124M is {both('full-4x256')}, "
        "a LoRA step\n"
        f"{both('lora-4x256')}, a small model's step {both('small-12x64')}. Generation is {times('generate', 1)} "
        "times as fast,\n"
        f"and {times('generate-int8', 1)} times with 8-bit weights beside the peer's float32 "
        "([`benchmarks/peers.json`](benchmarks/peers.json))."
    )


def dots() -> str:
    jobs = figures("second_order")["jobs"].values()
    times = [x["dots"]["seconds"] / x["gradient"]["seconds"] for x in jobs if "dots" in x]
    return (
        f"The derivative of every example's loss along a direction (`model.example_dots`) takes {min(times):.1f} "
        f"to {max(times):.1f} × a gradient, "
        "for all examples of a batch together."
    )


def explore_load() -> str:
    names = {"default": "the included model", "gpt2": "GPT-2, 124 million parameters", "smollm2": "SmolLM2-135M"}

    def rows() -> Iterator[list[str]]:
        for name, x in figures("explore_load")["models"].items():
            seconds = [f"{x[key]:.2f} s" for key in ("command", "page")]
            both = f"{x['command_range'][1] + x['page_range'][1]:.1f} s"
            yield [
                names[name],
                *seconds,
                both,
                f"{x['cpu']:.1f} s",
                mb(x["peak_bytes"]),
                f"{x['sent_bytes'] / 1e6:.1f} MB",
            ]

    head = ["model", "command to address", "request to first numbers", "both, slowest", "CPU", "memory", "sent"]
    return table(head, "lrrrrrr", rows())


def explore_views() -> str:
    views = figures("explore_views")["views"]
    shown = {
        "open": ["load", "study", "document"],
        "Training": ["training"],
        "One step: the first": ["first step"],
        "One step: the second": ["second step"],
        "One step: LoRA": ["lora"],
        "Live: open": ["live, open"],
        "Live: ten steps": ["live, ten steps"],
        "What if: a change": ["what if"],
        "What if: the knock-outs of a block": ["knock-outs"],
        "exercises: a sign": ["sign exercise"],
        "exercises: a mistake": ["mistake exercise"],
        "Mistakes: one mistake": ["mistake"],
    }

    def rows() -> Iterator[list[str]]:
        for view, keys in shown.items():
            yield [view, f"{sum(views[key]['cpu'] for key in keys):.1f} s", mb(views[keys[-1]]["peak_bytes"])]

    return table(["view", "CPU", "peak memory so far"], "lrr", rows())


TABLES: dict[str, Callable[[], str]] = {
    "peers": peers,
    "revisions": revisions,
    "busy": busy,
    "second-order": second_order,
    "growth": growth,
    "time-to-loss": time_to_loss,
    "recipe": recipe,
    "recipe-longer": recipe_longer,
    "more-text": more_text,
    "blame": blame,
    "private": private,
    "serving": serving,
    "sixteen-bit": sixteen_bit,
    "masked-rows": masked_rows,
    "time-gain": time_gain,
    "example-dots": dots,
    "readme-time": readme_time,
    "readme-speed": readme_speed,
    "explore-load": explore_load,
    "explore-views": explore_views,
}


def rewritten(text: str) -> str:
    """A page with its figures made again."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[4], text)


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if rewritten(text) != text:
            page.write_text(rewritten(text), encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
