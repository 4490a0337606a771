"""Text processing of language models: prompts, templates, detokenizing, tool calls, guides. No torch."""
