"""Threads that own a resource, and the mailboxes between them and the event loop. No torch."""
