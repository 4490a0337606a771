"""What a gateway counts, and `/metrics`.

meter        answers, from their beginning to their end
hops         how long the log's part of a request takes
exposition   the numbers as Prometheus reads them, those of the other roles by their beats
routes       `/metrics`, `/metrics.json`
"""
