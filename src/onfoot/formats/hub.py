"""Models on the Hugging Face Hub: found in its local cache, and downloaded only on request."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from onfoot.formats.files import one_line

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # org/name
FILES = (  # everything that `load` reads
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja", "adapter_config.json",
    "adapter_model.safetensors",
)  # fmt: skip
INSTALL = 'pip install "onfoot[hub]"'


def is_hub_name(path: str | Path) -> bool:
    """Whether a path that does not exist could be a name on the Hub, "org/name"."""
    return NAME.fullmatch(str(path)) is not None and not Path(path).exists()


def local_folder(path: str | Path) -> Path:
    """The path itself, or for a name on the Hub its folder in the local cache; nothing is downloaded."""
    if not is_hub_name(path):
        return Path(path)
    if find_spec("huggingface_hub") is None:
        raise ValueError(f"{path} is not a folder; if it is a name on the Hugging Face Hub: {INSTALL}, then --download")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError):
        folder = None
    if folder is None or not any(folder.glob("*.safetensors")):  # others may have cached some other files of it
        raise ValueError(
            f"{path} is not a folder, and not in the cache of the Hugging Face Hub; --download (in Python, "
            f"download=True) fetches it"
        )
    return folder


def fetch(path: str | Path) -> Path:
    """The folder of a name on the Hub, downloaded into the cache where it is not there yet; a local folder as it is."""
    if Path(path).exists():
        return Path(path)
    if not is_hub_name(path):
        raise ValueError(f"cannot download {path}: it is not a name on the Hugging Face Hub, such as org/name")
    if find_spec("huggingface_hub") is None:
        raise ValueError(f"cannot download {path}: huggingface_hub is not installed: {INSTALL}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(FILES)))
    except Exception as error:  # of the network, of the Hub, of the file system
        raise ValueError(f"cannot download {path} from the Hugging Face Hub: {one_line(error)}") from None
