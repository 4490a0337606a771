"""Tests of the preparation of JSON schemas."""
