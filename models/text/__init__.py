"""Text handling that language model families share: templates, detokenizing, tools, guides."""
