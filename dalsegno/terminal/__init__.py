"""Text output on a terminal: colours, diagrams, sanitised client text."""
