"""`dalsegno verify`: compares a log, or requests of it, with the seals and anchors of the log."""
