"""`dalsegno log`: lists recorded requests and describes their events."""
