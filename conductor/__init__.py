"""The conductor: decides which walk runs next, and on which rank."""
