"""Conversations: the items that several responses have in common (ADR 83).

routes.py   `/v1/conversations`
store.py    the conversations on the log: one, create, change, delete
state.py    the state of a conversation, by its events
turns.py    a response that continues one
items.py    items as clients send them, and as they are kept
"""
