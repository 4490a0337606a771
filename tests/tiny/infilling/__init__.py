"""A family whose answers come from a token program: `models.decoder_lm`, but it fills in blocks of tokens."""
