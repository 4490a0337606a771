"""Benchmarks. Each module measures one aspect; `python -m benchmarks` runs all of them.

    peers     speed compared with other engines, in turns on the same machine
    serving   cost of gateway, log and conductor, compared with the engine called in process
    hop       time and CPU of one decision of the conductor
    events    events per request, and the conductor's events per token (expected: none)
    replay    speed of replaying a log
    start     time until a deployment answers, and until it is ready
    log       cost of the log itself

They measure the system as it runs: real processes, a real log on disk, real checkpoints. The machine is
seldom idle, so alternatives are measured in turns, and CPU time is reported in addition to wall time.
"""
