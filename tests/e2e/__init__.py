"""Tests of a whole deployment: real processes, a real log, the bundled demo model."""
