"""OpenAI's published schema: `extract` takes what we need of it, `check` holds our answers against it."""
