"""LoRA adapters that are loaded and unloaded at run time."""
