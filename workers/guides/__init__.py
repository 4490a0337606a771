"""Checking and compiling of clients' guides: a fair queue, budgets of processor time, abandoned threads."""
