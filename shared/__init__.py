"""The vocabulary: what two planes need, and nothing else.

Events and their subjects, the walk language and plans, the log's port and its adapters, the models'
three faces. Nothing here knows the gateway, the conductor or the workers.
"""
