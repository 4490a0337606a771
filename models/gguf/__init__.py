"""GGUF files, llama.cpp's format, converted to checkpoint folders in Hugging Face format."""
