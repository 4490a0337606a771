"""The conductor: decides which walk is next and where it runs."""
