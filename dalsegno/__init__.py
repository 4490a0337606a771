"""The face of the project: command line, launcher, replay."""
