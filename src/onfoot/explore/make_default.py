"""Trains the default model of `onfoot explore`: `python -m onfoot.explore.make_default FOLDER`.

Two blocks of width 32, four heads, one token per character, trained for a few minutes on the prose of the language
reference that ships with Python. The text differs between versions of Python, and so do the weights.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tokenizers import normalizers

from onfoot.data import corpus
from onfoot.formats.tokenizer import char_tokenizer
from onfoot.train import pretrain
from onfoot.train.options import TrainOptions

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,:;'-()"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def prose() -> str:
    """The paragraphs of the reference that use only the alphabet, in lower case, as one line."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", corpus.builtin_text().text or ""):
        line = " ".join(re.sub(r'[*`"“”]', "", paragraph.lower()).replace("’", "'").split())
        if len(line) > 80 and set(line) <= set(ALPHABET):
            paragraphs.append(line)
    return " ".join(paragraphs)


def make(folder: Path, steps: int = 8000) -> None:
    """Trains the model and writes its four files to `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "prose.txt").write_text(prose(), encoding="utf-8")
        tokenizer = char_tokenizer([ALPHABET])
        tokenizer.backend.normalizer = normalizers.Lowercase()
        tokenizer.save(work, 64)
        options = TrainOptions(
            texts=[str(work / "prose.txt")],
            tokenizer=str(work),
            n_layer=2,
            n_head=4,
            n_embd=32,
            context=64,
            steps=steps,
            batch_size=32,
            lr=4e-3,
            eval_every=500,
            save_every=500,
            sample_tokens=80,
        )
        trainer = pretrain.start(work / "run", options)
        trainer.run()
        folder.mkdir(parents=True, exist_ok=True)
        trainer.model.save(work / "model")
        for name in FILES:
            shutil.copy(work / "model" / name, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
