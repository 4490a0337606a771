"""Measurements: each module is one question, `python -m benchmarks` asks them all.

    peers     how fast are we beside others' engines, in turns on the same machine?
    serving   what do gateway, log and conductor cost, against the engine called in process?
    hop       what does one decision of the conductor cost, in time and in CPU?
    events    how many events does a request make, and does a token need the conductor?
    replay    how fast is a log decided again?
    start     how long until it answers, and until it can work?
    log       what does the log itself cost?

They measure the system as it is: real processes, a real log on disk, real checkpoints. The machine they run
on is seldom quiet, so what is compared is measured in turns, and CPU time is told beside wall time.
"""
