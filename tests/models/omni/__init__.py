"""Tests of the kit of models that think and talk."""
