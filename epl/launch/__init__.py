"""`epl-launch`: starts a script once per rank, waits, and says what failed first.

    cli       the command                         options   what it was asked to do, checked all at once
    job       attempts until one succeeds         agent     one attempt on this machine (torch.distributed.elastic)
    machines  what the launchers of one job tell each other
    command   how a script becomes a process      keeper    each rank's parent: notes how it ended, ends all of it
    entry     runs a .py and records its error    failure   the record itself (the library uses it too)
    outcome   which rank failed first, and why    logs, live   where output is kept, and shown while it is written

`keeper`, `entry` and `failure` run in the ranks before the user's script: they import the standard library only.
"""
