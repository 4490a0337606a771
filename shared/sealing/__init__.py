"""Seals of the log: signed statements about its records, and their verification (ADR 25). Pure.

hashes         the leaf of a record, the chain over leaves
keys           Ed25519 keys as text
seals          a statement and its signed form
segment        the records since the last seal, folded into the next statement
anchors        copies of chain values outside of the log
findings       the results of a verification
log_check      verifies a whole log
request_check  verifies the records of a request, from a log or a bundle
"""
