"""`dalsegno gate`: recorded requests held against the installed code and configuration."""
