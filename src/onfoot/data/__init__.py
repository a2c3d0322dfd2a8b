"""Training data: text files as one token stream, and prompts with completions as packed examples."""
