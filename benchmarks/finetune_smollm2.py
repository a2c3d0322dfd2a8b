"""LoRA on SmolLM2-135M-Instruct with 50 examples: the run that docs/llama.md shows.

    python benchmarks/finetune_smollm2.py --out smollm2-quiz [--quantized]

It makes the data itself: questions about countries, answered in the manner of a quiz master. Training has 25 countries,
validation six others, so that a lower loss there is the manner learnt and not answers kept by heart.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import onfoot
from onfoot.models.model import Model
from onfoot.formats.chat import ChatTemplate, chat_prompt_ids
from onfoot.data.sft import SftSource, load_source

COUNTRIES = """Peru Lima South America; Egypt Cairo Africa; Norway Oslo Europe; Japan Tokyo Asia; Kenya Nairobi Africa;
Chile Santiago South America; Greece Athens Europe; Cuba Havana North America; Nepal Kathmandu Asia;
Spain Madrid Europe;
Ghana Accra Africa; Iraq Baghdad Asia; Italy Rome Europe; Canada Ottawa North America; Iran Tehran Asia;
Poland Warsaw Europe; Uganda Kampala Africa; Ecuador Quito South America; Finland Helsinki Europe; Qatar Doha Asia;
Senegal Dakar Africa; Uruguay Montevideo South America; Ireland Dublin Europe; Jamaica Kingston North America;
Vietnam Hanoi Asia; Austria Vienna Europe; Colombia Bogota South America; Morocco Rabat Africa; Thailand Bangkok Asia;
Portugal Lisbon Europe; Hungary Budapest Europe"""
HELD_OUT = 6


def write_data(folder: Path) -> tuple[Path, Path]:
    """train.jsonl with 50 examples and validation.jsonl with 12."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row.split(maxsplit=2) for row in COUNTRIES.replace("\n", " ").split(";")]
    paths = folder / "train.jsonl", folder / "validation.jsonl"
    for path, part in zip(paths, (rows[:-HELD_OUT], rows[-HELD_OUT:]), strict=True):
        lines = []
        for country, capital, continent in part:
            for question, answer in (
                (f"What is the capital of {country}?", capital),
                (f"On which continent is {country}?", continent),
            ):
                reply = f"Ding! It is {answer}. One point for {country}."
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
                lines.append(json.dumps({"messages": messages}))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def validation_loss(model: Model, source: SftSource) -> float:
    """The mean over all learnt tokens of the held-out examples."""
    total, n = 0.0, 0
    for batch in source.validation():
        total += model.loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments)
        n += int((batch.targets != -100).sum())
    return total / n


def answer(model: Model, template: ChatTemplate, question: str) -> str:
    assert model.tokenizer is not None
    ids = chat_prompt_ids(model.tokenizer, template, [{"role": "user", "content": question}])
    out = model.generate([ids], 40, temperature=0)[0]
    return model.tokenizer.decode(out[len(ids) :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quantized", action="store_true", help="keep the base in its 4-bit blocks")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    train, held_out = write_data(options.out)
    begun = time.monotonic()
    model = onfoot.load("smollm2", quantized=options.quantized)
    assert model.tokenizer is not None and model.tokenizer.chat_template is not None
    template = ChatTemplate(model.tokenizer.chat_template)
    mebibytes = sum(p.nbytes for p in model.params.values()) / 2**20
    print(f"loaded in {time.monotonic() - begun:.1f} s: {model.n_params:,} parameters, {mebibytes:.0f} MiB")
    source = load_source(
        [train], model.tokenizer, template, max_length=256, batch_size=2, validation_files=[held_out], seed=0
    )
    print(source.report())
    questions = ["What is the capital of Thailand?", "On which continent is Hungary?", "What is 2 + 3?"]
    before = {question: answer(model, template, question) for question in questions}
    print(f"step 0: validation loss {validation_loss(model, source):.4f}")
    model.add_lora(r=8, alpha=16)
    print(f"{model.n_trainable:,} parameters train, {model.n_trainable / model.n_params:.2%}")
    optimizer = onfoot.AdamW(model, lr=1e-3, weight_decay=0.0)
    begun, tokens = time.monotonic(), 0
    for step in range(source.steps_for(options.epochs)):
        (batch,) = source.microbatches(step)
        loss = model.train_step(optimizer, batch.tokens, batch.targets, segments=batch.segments)
        tokens += batch.tokens.size
        if (step + 1) % source.steps_for(1) == 0:
            seconds = time.monotonic() - begun
            print(
                f"step {step + 1}: loss {loss:.4f}, validation loss {validation_loss(model, source):.4f} "
                f"({seconds:.0f} s, {tokens / seconds:.0f} tokens/s)",
                flush=True,
            )
    model.save_adapter(options.out / "adapter")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:.0f} MiB")
    for question in questions:
        print(f"{question}\n  before: {before[question]}\n  after:  {answer(model, template, question)}")


if __name__ == "__main__":
    main()
