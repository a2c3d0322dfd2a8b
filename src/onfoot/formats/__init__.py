"""Files of other tools, in and out: Hugging Face folders, tokenizers."""
