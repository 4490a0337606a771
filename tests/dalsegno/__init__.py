"""Tests of the face: command line, launcher, roles' entry."""
