"""Templates: processes that have imported what a role needs, and fork the role's processes.

Importing torch and transformers takes most of a small worker's start. A template imports them once; each
process that it forks begins with all of it in place, and shares its memory. So a role that was killed is back
sooner, and several ranks import once (docs/adr/0052-roles-are-forked.md).
"""
