"""OpenAI's published schema: `extract` selects the needed parts, `check` compares our answers with them."""
