"""A server with OpenAI's API: requests are decoded together, each with the answer that it would get alone."""
