"""The client, against a gateway that answers by script, and against a log in memory."""
