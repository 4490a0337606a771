"""The conductor's mind: a pure fold over the log. No I/O, no clock, no chance."""
