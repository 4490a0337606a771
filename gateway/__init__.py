"""The gateway: HTTP in, events out, and outputs relayed in log order. Neither torch nor tokenizer."""
