"""Where batches come from: text files as one row of tokens, prompts and completions as packed examples."""
