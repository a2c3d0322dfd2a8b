"""Reading and writing the file formats of other tools: Hugging Face folders, GGUF, PEFT adapters, tokenizers."""
