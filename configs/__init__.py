"""Configurations that come with Dal Segno: a YAML file per model, and the demo model itself."""
