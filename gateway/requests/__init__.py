"""One request from submission to its last byte, independent of the API it came by."""
